"""The tokenizer of a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statecore._errors import LoadError
from statecore.models.files._chat import ChatTemplate
from statecore.models.files._engine_fast import FastEngine
from statecore.models.files._json import read_object
from statecore.models.files._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def folder_tokenizer(folder: Path, config: Mapping[str, Any]) -> TextTokenizer | None:
    """Returns the tokenizer, or None if the folder has no tokenizer.json.

    Args:
      folder: the folder.
      config: its config.json.

    Raises:
      LoadError: a file of the tokenizer is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    read_object(path)  # says what is wrong with JSON better than what follows
    tokenizer = _read_tokenizer(path)
    special = _special_tokens(folder)
    source = _template(folder)
    return TextTokenizer(
        FastEngine(tokenizer),
        where=str(folder),
        stop_tokens=_stop_tokens(folder, config) or _named(tokenizer.token_to_id(special.get("eos_token", ""))),
        template=None if source is None else ChatTemplate(source, special, str(folder)),
    )


def _read_tokenizer(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
        # Some parts that refer to what is not there are looked at here first.
        tokenizer.encode("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises nothing narrower, and its panics are no `Exception`
        raise LoadError(f"{path} is no tokenizer that the tokenizers package can read: {error}.") from error
    return tokenizer


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _named(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _special_tokens(folder: Path) -> dict[str, str]:
    """Returns the tokens with a role, such as `bos_token`, by its name."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _optional(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _stop_tokens(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end a text: of the first of these places that says any."""
    generation = folder / "generation_config.json"
    for where, table in (
        (generation, _optional(generation)),
        (folder / "config.json", config),
        (folder / "config.json", config.get("text_config") or {}),
    ):
        tokens = table.get("eos_token_id")
        if tokens is not None:
            return _token_list(where, tokens)
    return []


def _token_list(where: Path, tokens: Any) -> list[int]:
    listed = tokens if isinstance(tokens, list) else [tokens]
    if not all(type(token) is int and token >= 0 for token in listed):
        raise LoadError(f"{where} has the eos_token_id {tokens!r}, which is neither a token nor a list of tokens.")
    return listed


def _template(folder: Path) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name: a file of its own goes before the tokenizer's configuration."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja", **files}
    if files:
        return {name: _read(path) for name, path in files.items()}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _optional(folder / name).get("chat_template")
        if found is not None:
            return _by_name(folder / name, found)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as a chat template: {error}.") from error


def _by_name(path: Path, found: Any) -> str | dict[str, str]:
    if isinstance(found, str):
        return found
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise LoadError(f"{path} has a chat_template that is neither a text nor a list of named texts.") from error

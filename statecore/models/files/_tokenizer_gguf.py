"""The tokenizer that a GGUF file holds in its own fields."""

from typing import Any

import numpy as np

from statecore._errors import LoadError
from statecore.models.files._chat import ChatTemplate
from statecore.models.files._engine_bpe import MARKS_START, bpe_engine
from statecore.models.files._engine_scores import NORMAL, ScoreEngine
from statecore.models.files._gguf_header import Header
from statecore.models.files._tokenizer import Engine, TextTokenizer

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(header: Header) -> TextTokenizer | None:
    """Returns the tokenizer, or None if the file has none.

    Raises:
      LoadError: it is of a kind that is not known, or its fields contradict each other.
    """
    fields = _Fields(header)
    if fields.get("model") is None:
        return None
    engine = _engine(fields)
    stops = [token for name in ("eos", "eot") if (token := fields.token(name)) is not None]
    return TextTokenizer(engine, where=str(header.path), stop_tokens=stops, template=_template(fields))


class _Fields:
    """The fields of a tokenizer."""

    def __init__(self, header: Header):
        self.header = header
        self.tokens = self.get("tokens")
        if self.get("model") is not None and (not isinstance(self.tokens, list) or not self.tokens):
            raise self.fault("tokens is missing or empty")

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.fields.get(f"tokenizer.ggml.{key}", default)

    def text(self, key: str) -> str | None:
        """Returns a text, None where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(f"{key} is no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, int):
            raise self.fault(f"{key} is {value!r}, but true or false is needed")
        return bool(value)

    def token(self, role: str) -> int | None:
        token = self.get(f"{role}_token_id")
        if token is not None and not (isinstance(token, int) and 0 <= token < len(self.tokens)):
            raise self.fault(f"{role}_token_id is {token!r}, but there are {len(self.tokens)} tokens")
        return token

    def numbers(self, key: str) -> list[Any]:
        """Returns one number a token."""
        values = self.get(key)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise self.fault(f"{key} does not hold one number for each of {len(self.tokens)} tokens")
        return values.tolist()

    def kinds(self) -> list[int]:
        return [NORMAL] * len(self.tokens) if self.get("token_type") is None else self.numbers("token_type")

    def around(self, start_by_default: bool) -> tuple[list[int], list[int]]:
        """Returns the special tokens before and after every text."""
        wanted = {"bos": start_by_default, "eos": False}
        found = []
        for role, default in wanted.items():
            token = self.token(role)
            found.append([token] if self.flag(f"add_{role}_token", default) and token is not None else [])
        return found[0], found[1]

    def fault(self, what: str) -> LoadError:
        return LoadError(f"{self.header.path}: tokenizer.ggml.{what}.")


def _engine(fields: _Fields) -> Engine:
    model, split = fields.text("model"), fields.text("pre")
    if model == "gpt2":
        before, after = fields.around(split in MARKS_START)
        return bpe_engine(
            str(fields.header.path),
            fields.tokens,
            fields.get("merges"),
            fields.kinds(),
            split=split,
            before=before,
            after=after,
        )
    if model == "llama":
        return _score_engine(fields)
    raise fields.fault(f"model is {model!r}, but tokenizers of these are read: gpt2, llama")


def _score_engine(fields: _Fields) -> ScoreEngine:
    before, after = fields.around(True)
    try:
        return ScoreEngine(
            fields.tokens,
            fields.numbers("scores"),
            fields.kinds(),
            unknown=fields.token("unknown"),
            before=before,
            after=after,
            has_prefix=fields.flag("add_space_prefix", True),
        )
    except ValueError as error:  # a byte token that names no byte
        raise fields.fault(f"tokens does not spell its byte tokens as <0x00>: {error}") from error


def _template(fields: _Fields) -> ChatTemplate | None:
    source = fields.header.fields.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    roles = {name: fields.token(role) for name, role in _ROLES.items()}
    special = {name: fields.tokens[token] for name, token in roles.items() if token is not None}
    return ChatTemplate(source, special, str(fields.header.path))

"""Chat templates, rendered as Hugging Face transformers renders them.

A template comes with the model and may come from anybody, so it runs in Jinja's sandbox and sees plain data only.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from statecore._errors import LoadError, UnsupportedError

Message = Mapping[str, Any]

# A model's reasoning has these names in messages; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Take a subclass, such as a member of an enumeration, back to plain data.
_BASES: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


class ChatTemplate:
    """One template, or several by name, with the special tokens that they may use."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str], where: str):
        """Compiles nothing yet.

        Args:
          source: the template; or several, of which `tool_use` serves calls with tools and
            `default` all others.
          special_tokens: `bos_token` and such, by name.
          where: for messages.
        """
        self.where, self.special_tokens = where, dict(special_tokens)
        self._sources = {"default": source} if isinstance(source, str) else dict(source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """Returns the text of a chat.

        Raises:
          LoadError: the template cannot be parsed, or tries to leave its sandbox.
          UnsupportedError: it refuses these messages, does not end, or a value is not plain data.
        """
        from jinja2 import TemplateSyntaxError
        from jinja2.exceptions import SecurityError

        from statecore.models.files._chat_limits import limited_time

        if not messages:
            raise UnsupportedError("A chat needs at least one message.")
        values = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **_plain(variables, "A variable"),
            "messages": [_message(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            template = _compiled(self._choose(values["tools"] is not None))
            with limited_time():
                return template.render(values)
        except TemplateSyntaxError as error:
            raise LoadError(
                f"The chat template of {self.where} cannot be parsed, line {error.lineno}: {error}."
            ) from error
        except SecurityError as error:
            raise LoadError(f"The chat template of {self.where} tries to leave its sandbox: {error}.") from error
        except LoadError:
            raise
        except Exception as error:  # a template can call for any that plain data raise
            what = str(error) or type(error).__name__
            raise UnsupportedError(f"The chat template of {self.where} refuses these messages: {what}") from error

    def _choose(self, has_tools: bool) -> str:
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._sources:
                return self._sources[name]
        found = ", ".join(self._sources) or "none"
        raise LoadError(f"{self.where} has no chat template named `default`; it has: {found}.")


def _message(message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: without absent values, reasoning under every name."""
    if not isinstance(message, Mapping):
        raise UnsupportedError(f"A message of a chat is a mapping with a role and a content, not {message!r}.")
    plain = {key: _plain(value, "A message") for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, what: str) -> Any:
    """Returns a copy made of JSON's types only: other objects have methods that a template might call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind, base in _BASES.items():
        if isinstance(value, kind):
            return base(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), what)
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(entry, what) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, what) for entry in value]
    raise UnsupportedError(f"{what} of a chat holds {type(value).__name__}, but a template sees plain JSON data only.")


@functools.lru_cache(maxsize=16)
def _compiled(source: str):
    return _environment().compiled(source)


@functools.cache
def _environment():
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.utils import Namespace

    from statecore.models.files._chat_limits import LimitedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model wrote, for training; its text is what it encloses."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace without names that reach into Python."""

        def __init__(*args: Any, **kwargs: Any):
            self, *rest = args
            values = dict(*rest, **kwargs)
            for name in values:
                check_name(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _make_dict,
        "namespace": PlainNamespace,
    }
    environment.globals.update(functions)
    # As much filling text as is asked for.
    del environment.globals["lipsum"]
    return environment


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict`, without the attributes of the type."""
    return dict(*args, **kwargs)


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Unlike Jinja's own `tojson`, escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

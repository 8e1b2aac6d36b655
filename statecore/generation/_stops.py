"""Where an output ends: stop tokens, and stop strings with look-behind."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from statecore._errors import GeometryError, UnsupportedError
from statecore.backend import Tokenizer, checks
from statecore.generation._text import TextStream


class Scan(NamedTuple):
    """What is known after a piece of text.

    text: certain to stand before any stop string.
    held: may be the beginning of one, so it waits.
    match: the stop string that was found; the text ends before it. None if none was.
    """

    text: str
    held: str
    match: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopStrings:
    """Strings that end an output, which then ends before them.

    The match whose end comes first counts, and the longest of those that end there. So
    how the text was cut into pieces never matters, and a match is known at its last
    character. Make one with `stop_strings`, which checks them.
    """

    strings: tuple[str, ...] = ()

    def scan(self, held: str, piece: str) -> Scan:
        """Returns what `piece` decides, after `held` of the pieces before it; the text held is the only state."""
        text = held + piece
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.strings if stop in text]
        if ends:
            end, _, stop = min(ends)
            return Scan(text[: end - len(stop)], "", stop)
        num_held = max((_overlap(text, stop) for stop in self.strings), default=0)
        return Scan(text[: len(text) - num_held], text[len(text) - num_held :], None)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def stop_strings(strings: str | Iterable[str], tokenizer: Tokenizer | None) -> StopStrings:
    """Returns the stop strings, checked.

    Raises:
      UnsupportedError: one is empty or can never match: it holds U+FFFD or a lone
        surrogate, or comes back from the tokenizer as something else; or the model has no
        tokenizer.
    """
    if not isinstance(strings, Iterable):
        raise UnsupportedError(f"Stop strings are texts, but were given as {strings!r}.")
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    if strings and tokenizer is None:
        raise UnsupportedError("Stop strings need a tokenizer, but this model was loaded without one. Use stop tokens.")
    faults = [fault for string in strings if (fault := _fault(string, tokenizer))]
    if faults:
        raise UnsupportedError("These stop strings cannot be used: " + "; ".join(faults) + ".")
    return StopStrings(strings=tuple(dict.fromkeys(strings)))


def _fault(string: str, tokenizer: Tokenizer | None) -> str | None:
    if not isinstance(string, str):
        return f"{string!r} is not a string"
    if not string:
        return "'' would end every output before its first character"
    if any(char == "\ufffd" or "\ud800" <= char <= "\udfff" for char in string):
        return f"{string!r} can never match: U+FFFD and lone surrogates are no text that tokens stand for"
    # Between others, since a tokenizer may strip or add a space at the ends of a text.
    assert tokenizer is not None
    if not any(string in tokenizer.decode(tokenizer.encode(text)) for text in (string, f"a{string}a", f"a {string} a")):
        return f"{string!r} can never match: encoded and decoded by this tokenizer, it is other text"
    return None


def stop_tokens(tokens: int | Iterable[int], vocab_size: int) -> frozenset[int]:
    """Returns the tokens that end an output, checked.

    Raises:
      GeometryError: one is outside the vocabulary, and could never match.
    """
    if not isinstance(tokens, int | Iterable):
        raise GeometryError(f"Stop tokens are token ids, but were given as {tokens!r}.")
    values = [tokens] if isinstance(tokens, int) else list(tokens)
    found = [checks.whole(token, "A stop token") for token in values]
    if any(token >= vocab_size for token in found):
        raise GeometryError(f"Stop tokens {sorted(found)} are outside the vocabulary of {vocab_size}.")
    return frozenset(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stops:
    """What ends the outputs of a generation.

    strings: an output ends before the first of them.
    tokens: an output ends with the first of them, whose own text is left out.
    """

    strings: StopStrings = StopStrings()
    tokens: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputText:
    """The text of one sequence's output and whether it has ended; immutable, so that a snapshot may share it.

    stream: decodes the tokens; None for a model without a tokenizer, which has no text.
    stops: what ends the output.
    held: text that may be the beginning of a stop string.
    finish: None while the output goes on, else "stop_token" or "stop_string".
    match: the stop string or token that ended it.
    """

    stream: TextStream | None
    stops: Stops = Stops()
    held: str = ""
    finish: str | None = None
    match: str | int | None = None

    def push(self, token: int) -> tuple["OutputText", str]:
        """Returns the output after `token`, and the text that is certain now. After the end, nothing changes.

        Raises:
          UnsupportedError: the token changes text that was given out, see `TextStream.push`.
        """
        if self.finish is not None:
            return self, ""
        if token in self.stops.tokens:
            ended, text = self.flush()
            if ended.finish is None:  # the text that was held may have ended it first
                ended = dataclasses.replace(ended, finish="stop_token", match=token)
            return ended, text
        if self.stream is None:
            return self, ""
        stream, piece = self.stream.push(token)
        return self._scanned(stream, piece)

    def flush(self) -> tuple["OutputText", str]:
        """Returns the output with nothing held, and what was held: for an output cut off by its length."""
        if self.stream is None or self.finish is not None:
            return self, ""
        stream, piece = self.stream.flush()
        scanned, text = self._scanned(stream, piece)
        return dataclasses.replace(scanned, held=""), text + scanned.held

    def _scanned(self, stream: TextStream, piece: str) -> tuple["OutputText", str]:
        text, held, match = self.stops.strings.scan(self.held, piece)
        finish = None if match is None else "stop_string"
        return dataclasses.replace(self, stream=stream, held=held, finish=finish, match=match), text

"""Text from tokens, one token at a time, as a value."""

import dataclasses

from statecore._errors import UnsupportedError
from statecore.backend import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 of them may wait for the last.
_MOST_PARTIAL = 3
# Tokens kept before the new ones: what a token's text may depend on.
_LOOK_BACK = 8
# Tokens after which text that has changed under the stream is not waited for any longer.
_MOST_HELD = 4 * _LOOK_BACK


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStream:
    """Decodes one sequence's tokens as they come; immutable, so that a snapshot may share it.

    The pieces, joined, are `tokenizer.decode` of all tokens. Bytes of an unfinished
    character are held back until it is whole, or cannot become so. Each token costs one
    decode of at most some twenty tokens, whatever was decoded before: a token's text may
    depend on the eight tokens before it. (A run of tokens without any text is kept whole.)

    tokenizer: decodes lists of tokens.
    context: the last tokens: enough before the held ones to decode those rightly.
    given: the text of `context` that has been given out.
    """

    tokenizer: Tokenizer
    context: tuple[int, ...] = ()
    given: str = ""

    def push(self, token: int) -> tuple["TextStream", str]:
        """Returns the stream after `token`, and the text that is certain now and was not before.

        Raises:
          UnsupportedError: the token changes text that was given out already, which no
            stream can take back; decode all tokens at once instead.
        """
        context = (*self.context, token)
        text = self.tokenizer.decode(list(context))
        certain = text[: len(text) - _num_partial(text)]
        if certain.startswith(self.given):
            stream = dataclasses.replace(self, context=context, given=certain)
            return stream._trimmed(text), certain[len(self.given) :]
        # Byte-level decoders may show a whole run of bytes as U+FFFD until its end is known.
        if text.endswith(_REPLACEMENT) and len(context) <= _MOST_HELD:
            return dataclasses.replace(self, context=context), ""
        raise self._contradiction(text)

    def flush(self) -> tuple["TextStream", str]:
        """Returns the stream with nothing held, and the text that was held: of the sequence's end.

        Raises:
          UnsupportedError: what is held changes text that was given out already.
        """
        text = self.tokenizer.decode(list(self.context))
        if not text.startswith(self.given):
            raise self._contradiction(text)
        return dataclasses.replace(self, given=text), text[len(self.given) :]

    def _trimmed(self, text: str) -> "TextStream":
        """Returns the stream with a shorter context, if a shorter one decodes to the end of `text`."""
        if len(self.context) <= 2 * _LOOK_BACK:
            return self
        # A cut inside a character does not decode to the end of the text, so others are tried.
        for kept in range(_LOOK_BACK, _LOOK_BACK + _MOST_PARTIAL + 1):
            context = self.context[-kept:]
            tail = self.tokenizer.decode(list(context))
            dropped = len(text) - len(tail)
            if tail and text.endswith(tail) and 0 <= dropped < len(self.given):
                return dataclasses.replace(self, context=context, given=self.given[dropped:])
        return self

    def _contradiction(self, text: str) -> UnsupportedError:
        return UnsupportedError(
            f"The tokens now decode to {text[-40:]!r}, but {self.given[-40:]!r} was given out before, and a stream "
            "cannot take it back. Does the tokenizer rewrite earlier text, such as bytes that turn out not to be "
            "UTF-8? Decode all tokens at once instead."
        )


def _num_partial(text: str) -> int:
    """Returns how many characters at the end may be bytes of an unfinished character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_PARTIAL)

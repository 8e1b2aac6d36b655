"""Grammars as constraints, over the llguidance library: `pip install statecore[llguidance]`."""

import json
from typing import Any

import numpy as np

from statecore._errors import GeometryError, LoadError, UnsupportedError
from statecore.backend import Tokenizer, checks

# Bytes that stand in UTF-8 text, apart from ASCII: each as a character that holds it.
_LEADS = [chr(code) for code in (*range(0x80, 0x800, 0x40), *range(0x1000, 0x10000, 0x1000), 0x800, 0x10000)]
_LEADS += [chr(code) for code in (0x40000, 0x80000, 0xC0000, 0x100000)]
_CONTINUATIONS = [chr(code) for code in range(0x80, 0xC0)]
_TEXT_CHARACTERS = [char for char in _LEADS + _CONTINUATIONS if not "\ud800" <= char <= "\udfff"]
# 0xC0, 0xC1 and 0xF5 to 0xFF stand in no UTF-8, so no text can tell which tokens they are.
_NUM_BYTES_OF_NO_TEXT = 13
# What a model without an end token gets: llguidance needs one. No mask of ours shows it.
_END = "<|statecore end|>"


class Grammars:
    """Makes constraints for one tokenizer. Build it once: it indexes the whole vocabulary.

    Args:
      tokenizer: a `tokenizers.Tokenizer`, or one of this library whose tokens each decode
        to their own text, or to single bytes.
      vocab_size: V, of the model's logits.
      end_token: allowed where the grammar may end; None if the model has none: an output
        then ends where nothing may follow.

    Raises:
      LoadError: llguidance is not installed.
      UnsupportedError: the bytes of a token cannot be told from the tokenizer.
      GeometryError: the end token is outside the vocabulary.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_token: int | None = None):
        self._library = _library()
        self.vocab_size = checks.whole(vocab_size, "vocab_size", least=1)
        if end_token is not None and checks.whole(end_token, "end_token") >= vocab_size:
            raise GeometryError(f"end_token is {end_token}, but the vocabulary has {vocab_size} tokens.")
        is_fast = hasattr(tokenizer, "to_str")  # a `tokenizers.Tokenizer`
        make = _fast_source if is_fast else self._wrapped_source
        source, end = make(tokenizer, self.vocab_size, end_token)
        self._hidden = end if end_token is None else None
        self._tokenizer = self._library.LLTokenizer(source, n_vocab=max(vocab_size, end + 1), eos_token=end)

    def regex(self, pattern: str) -> "GrammarConstraint":
        """Returns a constraint to text that the pattern matches as a whole (Rust's regex syntax).

        Raises:
          UnsupportedError: the pattern is not one.
        """
        return self._constraint(self._library.LLMatcher.grammar_from_regex(pattern))

    def json_schema(self, schema: dict[str, Any] | str) -> "GrammarConstraint":
        """Returns a constraint to JSON that a schema accepts.

        Raises:
          UnsupportedError: the schema is not one, or holds what llguidance does not support.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise UnsupportedError(f"The schema is not JSON: {error}.") from None
        return self._constraint(self._library.LLMatcher.grammar_from_json_schema(text))

    def lark(self, grammar: str) -> "GrammarConstraint":
        """Returns a constraint to text of a context-free grammar, in llguidance's form of Lark.

        Raises:
          UnsupportedError: the grammar is not one.
        """
        return self._constraint(self._library.LLMatcher.grammar_from_lark(grammar))

    def _constraint(self, grammar: str) -> "GrammarConstraint":
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UnsupportedError(f"llguidance refuses this grammar: {matcher.get_error().strip()}")
        return GrammarConstraint(matcher, self.vocab_size, self._hidden)

    def _wrapped_source(self, tokenizer: Tokenizer, vocab_size: int, end_token: int | None) -> tuple[Any, int]:
        """Returns what llguidance reads a tokenizer of this library from, and the end token."""
        end = vocab_size if end_token is None else end_token
        return self._library.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, end)), end


def _fast_source(tokenizer: Any, vocab_size: int, end_token: int | None) -> tuple[str, int]:
    """Returns the JSON of a `tokenizers.Tokenizer`, with an end token added if it has none, and the end token."""
    if end_token is not None:
        return tokenizer.to_str(), end_token
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.add_special_tokens([_END])
    return copy.to_str(), copy.token_to_id(_END)


class GrammarConstraint:
    """One sequence's place in a grammar: a constraint; `Grammars` makes them.

    A copy shares the compiled grammar and holds the tokens taken so far, so what it costs
    is known; its matcher is a deep copy of the first one, made and fed when it is needed.
    """

    def __init__(self, start: Any, vocab_size: int, hidden: int | None = None, tokens: tuple[int, ...] = ()):
        self._start, self._vocab_size = start, vocab_size  # `start` is never advanced
        self._hidden = hidden  # an end token that the model does not have
        self._tokens = list(tokens)
        self._live: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow."""
        return self._matcher().is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the text is whole, though more may follow."""
        return self._matcher().is_accepting()

    def mask(self) -> np.ndarray:
        """Returns `[V]` bool, the tokens that may follow; none once it is complete."""
        matcher = self._matcher()
        if matcher.is_stopped():
            return np.zeros(self._vocab_size, bool)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size).astype(bool)
        if self._hidden is not None:
            mask[self._hidden : self._hidden + 1] = False
        self._check()
        return mask

    def advance(self, token: int) -> None:
        """Takes a token; raises UnsupportedError, unchanged, for one that the mask forbids."""
        token, matcher = checks.whole(token, "A token"), self._matcher()
        # A matcher that is given a wrong token is lost, so it is asked first.
        is_token = token < self._vocab_size and token != self._hidden
        if not is_token or matcher.is_stopped() or matcher.validate_tokens([token]) != 1:
            raise UnsupportedError(
                f"Token {token} may not follow the {len(self._tokens)} tokens so far in this grammar."
            )
        matcher.consume_token(token)
        self._check()
        self._tokens.append(token)

    def copy(self) -> "GrammarConstraint":
        """Returns an independent copy at the same point, which shares the compiled grammar."""
        return GrammarConstraint(self._start, self._vocab_size, self._hidden, tuple(self._tokens))

    def nbytes(self) -> int:
        """Returns the bytes of what a copy does not share: its tokens."""
        return 8 * len(self._tokens)

    def _matcher(self) -> Any:
        if self._live is None:
            matcher = self._start.deep_copy()
            matcher.consume_tokens(self._tokens)
            self._live = matcher
            self._check()
        return self._live

    def _check(self) -> None:
        if self._live.is_error():
            message, self._live = self._live.get_error(), None
            raise UnsupportedError(f"llguidance gave up on this grammar: {message.strip()}")


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [*_token_bytes(tokenizer, vocab_size, end), *[b""] * (end + 1 - vocab_size)]
        self.tokens[end] = _END.encode()
        self.special_token_ids = [end]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="surrogateescape"))


def _token_bytes(tokenizer: Tokenizer, vocab_size: int, end: int) -> list[bytes]:
    """Returns each token's bytes; empty for one that stands in no text, which is then never allowed."""
    single = _single_bytes(tokenizer)
    found = [single.get(token) or _text_bytes(tokenizer, token) for token in range(vocab_size) if token != end]
    found[end:end] = [b""] if end < vocab_size else []
    unknown = [token for token, text in enumerate(found) if text is None]
    if len(unknown) > _NUM_BYTES_OF_NO_TEXT:
        raise UnsupportedError(
            f"The bytes of tokens {unknown[:5]} cannot be told: alone they decode to U+FFFD. Give the "
            "`tokenizers.Tokenizer` itself."
        )
    return [text or b"" for text in found]


def _single_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Returns the tokens that are single bytes of characters beyond ASCII, if characters have such."""
    found: dict[int, bytes] = {}
    for char in _TEXT_CHARACTERS:
        tokens, raw = tokenizer.encode(char), char.encode()
        partial = all("\ufffd" in tokenizer.decode([token]) for token in tokens)
        if partial and len(tokens) == len(raw) and tokenizer.decode(tokens) == char:
            found.update((token, raw[i : i + 1]) for i, token in enumerate(tokens))
    return found


def _text_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns the bytes of a token's text; None if it is part of a character."""
    # Between others of itself, since a tokenizer may strip the first space of a text.
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    text = twice[len(alone) :] if twice.startswith(alone) else alone
    return None if "\ufffd" in text else text.encode()


def _library() -> Any:
    try:
        import llguidance  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LoadError("Grammars need the llguidance library: `pip install statecore[llguidance]`.") from None
    return llguidance

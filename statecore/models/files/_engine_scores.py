"""Tokens by the scores of their texts, as SentencePiece's BPE merges them; pure Python.

GGUF files of such models hold no merges, and to find those of a large vocabulary takes longer than to tokenize a book.
"""

import heapq
from collections.abc import Iterator, Sequence

_SPACE = "\u2581"
# Kinds of tokens, as GGUF numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class ScoreEngine:
    """Merges the two neighbors whose joint text has the best score, until none is a token."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        kinds: Sequence[int],
        *,
        unknown: int | None,
        before: Sequence[int],
        after: Sequence[int],
        has_prefix: bool,
    ):
        """Indexes the vocabulary.

        Args:
          tokens: their texts, spaces as U+2581.
          scores: of each token; higher merges first.
          kinds: of each token.
          unknown: stands for what has no token, not even of bytes.
          before: special tokens at the start of every text.
          after: special tokens at its end.
          has_prefix: whether a text, and what follows a special token, begins with a space.
        """
        self._before, self._after, self._unknown = list(before), list(after), unknown
        self._prefix = has_prefix
        self._scores = scores
        self._num_tokens = len(tokens)
        texts = list(zip(tokens, kinds, strict=True))
        self._ids = {
            text.replace(" ", _SPACE): token
            for token, (text, kind) in enumerate(texts)
            if kind in (NORMAL, USER_DEFINED)
        }
        self._bytes = {int(text[3:5], 16): token for token, (text, kind) in enumerate(texts) if kind == BYTE}
        self._whole = _Whole(
            {
                text.replace(_SPACE, " "): token
                for token, (text, kind) in enumerate(texts)
                if kind in (CONTROL, USER_DEFINED)
            }
        )
        self._raw = [_raw(text, kind) for text, kind in texts]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a text."""
        found: list[int] = []
        follows_whole = True
        for part in self._whole.split(text):
            if isinstance(part, int):
                found.append(part)
            else:
                found += self._merged((" " + part if self._prefix and follows_whole else part).replace(" ", _SPACE))
            follows_whole = isinstance(part, int)
        return [*self._before, *found, *self._after] if add_special_tokens else found

    def decode(self, tokens: list[int]) -> str:
        """Returns the text without special tokens."""
        raw = b"".join(self._raw[token] for token in tokens if 0 <= token < self._num_tokens)
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if self._prefix else text

    def largest(self) -> tuple[int, int]:
        """Returns the largest token, twice: none is added to the vocabulary."""
        return self._num_tokens - 1, self._num_tokens - 1

    def _merged(self, text: str) -> list[int]:
        pieces, nexts = list(text), list(range(1, len(text) + 1))
        previous = list(range(-1, len(text) - 1))
        heap: list[tuple[float, int, str]] = []

        def offer(left: int) -> None:
            right = nexts[left] if left >= 0 else len(text)
            if right < len(text):
                joint = pieces[left] + pieces[right]
                if joint in self._ids:
                    heapq.heappush(heap, (-self._scores[self._ids[joint]], left, joint))

        for left in range(len(text) - 1):
            offer(left)
        while heap:
            _, left, joint = heapq.heappop(heap)
            right = nexts[left]
            # What was offered may have been merged with others since.
            if not pieces[left] or right >= len(text) or pieces[left] + pieces[right] != joint:
                continue
            pieces[left], pieces[right], nexts[left] = joint, "", nexts[right]
            if nexts[right] < len(text):
                previous[nexts[right]] = left
            offer(left)
            offer(previous[left])
        return [token for piece in pieces if piece for token in self._tokens(piece)]

    def _tokens(self, piece: str) -> list[int]:
        """Returns the token of a piece, or those of its bytes."""
        if piece in self._ids:
            return [self._ids[piece]]
        spelled = [self._bytes.get(byte) for byte in piece.replace(_SPACE, " ").encode()]
        known = [token for token in spelled if token is not None]
        if len(known) == len(spelled):
            return known
        return [] if self._unknown is None else [self._unknown]


def _raw(text: str, kind: int) -> bytes:
    if kind == BYTE:
        return bytes([int(text[3:5], 16)])
    return b"" if kind in (CONTROL, UNKNOWN) else text.replace(_SPACE, " ").encode()


class _Whole:
    """Finds the texts that are one token wherever they stand, the longest first."""

    def __init__(self, tokens: dict[str, int]):
        self._tokens = {text: token for text, token in tokens.items() if text}
        self._lengths: dict[str, list[int]] = {}
        for text in self._tokens:
            self._lengths.setdefault(text[0], []).append(len(text))
        # Few lengths share a first character, however many tokens do.
        self._lengths = {char: sorted(set(found), reverse=True) for char, found in self._lengths.items()}

    def split(self, text: str) -> Iterator[str | int]:
        """Yields tokens and the texts between them, none of which is empty."""
        start = at = 0
        while at < len(text):
            length = self._match(text, at)
            if not length:
                at += 1
                continue
            if start < at:
                yield text[start:at]
            yield self._tokens[text[at : at + length]]
            start = at = at + length
        if start < len(text):
            yield text[start:]

    def _match(self, text: str, at: int) -> int:
        lengths = self._lengths.get(text[at], ())
        return next((length for length in lengths if text[at : at + length] in self._tokens), 0)

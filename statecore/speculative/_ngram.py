"""Drafts by looking up what followed last time (prompt lookup)."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramDraft:
    """Guesses that a repeated stretch of text goes on as it did before.

    The longest suffix of the history that occurs earlier is found, and what followed its
    latest earlier occurrence is the guess. Text that repeats is guessed well; other text
    costs nothing but the look-up.

    num_draft: the most tokens guessed at once.
    max_ngram: the longest suffix looked for.
    min_ngram: the shortest.
    """

    num_draft: int = 4
    max_ngram: int = 8
    min_ngram: int = 2

    def propose(self, history: Sequence[int], limit: int) -> list[int]:
        """Returns up to `limit` tokens that may follow `history`, or none."""
        tokens = np.array(history)
        # Whether the last `size` tokens also end at each earlier place, for a growing `size`.
        ends = np.ones(max(len(tokens) - 1, 0), bool)
        found = None
        for size in range(1, min(self.max_ngram, len(tokens) - 1) + 1):
            ends[: size - 1] = False
            ends[size - 1 :] &= tokens[: len(tokens) - size] == tokens[-size]
            if not ends.any():
                break
            if size >= self.min_ngram:
                found = int(np.flatnonzero(ends)[-1])
        return [] if found is None else tokens[found + 1 : found + 1 + limit].tolist()

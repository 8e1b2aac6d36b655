"""Drafts by looking up what followed last time (prompt lookup)."""

import dataclasses
from collections.abc import Sequence


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
        history = list(history)
        for size in range(min(self.max_ngram, len(history) - 1), self.min_ngram - 1, -1):
            start = _last_earlier(history, size)
            if start is not None:
                return history[start + size : start + size + limit]
        return []


def _last_earlier(history: list[int], size: int) -> int | None:
    """Returns where the last `size` tokens occurred latest before their own place."""
    suffix = history[-size:]
    for start in range(len(history) - size - 1, -1, -1):
        if history[start : start + size] == suffix:
            return start
    return None

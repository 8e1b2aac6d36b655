"""Drafts by looking up what followed last time (prompt lookup)."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from statecore.generation import Guess


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramDraft:
    """Guesses that a repeated stretch of text goes on as it did before.

    The longest suffix of the history that occurs earlier is found, and what followed its
    latest earlier occurrence is the guess, over again where it reaches the end. Text that
    repeats is guessed well; other text costs nothing but the look-up.

    num_draft: the most tokens guessed at once.
    max_ngram: the longest suffix looked for.
    min_ngram: the shortest.
    worth: tokens that a window must emit to be worth its time, in the mean of the last ones; below
      it nothing is guessed for a while. 0 to guess always.
    """

    num_draft: int = 4
    max_ngram: int = 8
    min_ngram: int = 2
    worth: float = 1.3

    @property
    def device_guess(self) -> Guess:
        """How the guess is made on the device, the same guess for every sequence at once."""
        return _device_guess(self.max_ngram, self.min_ngram)

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
        if found is None:
            return []
        # What comes after the end of the history is taken to repeat what is between.
        return tokens[found + 1 + np.arange(limit) % (len(tokens) - 1 - found)].tolist()


@functools.lru_cache(maxsize=16)
def _device_guess(max_ngram: int, min_ngram: int) -> Guess:
    """Returns the guess on the device; one object for each pair of sizes."""

    def guess(history: jax.Array, length: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(lambda tokens, length: _guess(tokens, length, limit, max_ngram, min_ngram))(history, length)

    return guess


def _guess(tokens: jax.Array, length: jax.Array, limit: int, max_ngram: int, min_ngram: int):
    """Returns what followed the latest earlier place `[limit]` that ends with the longest suffix, and how many."""
    places = jnp.arange(tokens.shape[0])
    goes_on = places < length - 1
    matched = jnp.zeros_like(tokens)
    for size in range(1, max_ngram + 1):
        before = jnp.concatenate([tokens[:1].repeat(size - 1), tokens[: tokens.shape[0] - size + 1]])
        wanted = tokens[jnp.maximum(length - size, 0)]
        goes_on &= (before == wanted) & (places >= size - 1)
        matched += goes_on
    longest = jnp.max(matched)
    found = jnp.max(jnp.where(matched == longest, places, -1))
    following = found + 1 + jnp.arange(limit) % jnp.maximum(length - 1 - found, 1)
    return tokens[following], jnp.where((longest >= min_ngram) & (longest > 0), limit, 0)

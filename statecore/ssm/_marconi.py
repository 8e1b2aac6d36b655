"""Checkpoints in a prefix cache while decoding (the policy is Marconi's, arXiv 2411.19379)."""

import dataclasses
from typing import Protocol

from statecore._errors import IdentityError, LifecycleError
from statecore._typing import IntLike, PyTree
from statecore.backend import Backend
from statecore.ssm._sequence import SequenceState


class Cache(Protocol):
    """What is asked of a prefix cache; `statecore.PrefixCache` is one."""

    backend: Backend
    block_size: int

    def occupancy(self) -> tuple[int, int] | None: ...

    def should_checkpoint(self, num_tokens: int, last: int | None = None) -> bool: ...

    def insert(self, state: PyTree, tokens: IntLike, row: int = 0) -> bool: ...


def marconi_checkpoint(seq: SequenceState, cache: Cache) -> SequenceState:
    """Keeps each sequence in `cache` if a checkpoint is due there; never fails for want of room.

    A checkpoint is due by the tokens the state holds, and is registered at exactly that
    count: a state labeled with fewer would apply some tokens twice.

    Args:
      seq: without an open window, so that only committed tokens are kept.
      cache: of the same backend.

    Raises:
      LifecycleError: a window is open.
      IdentityError: the cache is of another backend.
    """
    if seq.opened is not None:
        raise LifecycleError("A window is open: only committed tokens may enter a prefix cache. Resolve it first.")
    if cache.backend is not seq.backend:
        raise IdentityError(f"The cache is of {cache.backend!r}, another backend than the sequence's.")
    marked = list(seq.marked or (0,) * len(seq.tokens))
    for row, tokens in enumerate(seq.tokens):
        if cache.should_checkpoint(len(tokens), marked[row]):
            if cache.insert(seq.state, tokens, row):
                marked[row] = len(tokens) // cache.block_size
    return dataclasses.replace(seq, marked=tuple(marked))


def snapshot_occupancy(cache: Cache) -> tuple[int, int] | None:
    """Returns the cache's slots in use and in all; None if it has none. A ring never counts."""
    return cache.occupancy()

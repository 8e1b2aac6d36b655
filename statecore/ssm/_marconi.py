"""Checkpoints in a prefix cache while decoding (the policy is Marconi's, arXiv 2411.19379)."""

import dataclasses
import warnings
from typing import Protocol, runtime_checkable

from statecore._errors import FencedError, GeometryError, IdentityError, LifecycleError
from statecore._typing import IntLike, PyTree
from statecore.backend import Backend
from statecore.ssm._doors import check_sequence
from statecore.ssm._sequence import SequenceState


@runtime_checkable
class Cache(Protocol):
    """What is asked of a prefix cache; `statecore.PrefixCache` is one."""

    backend: Backend
    block_size: int

    def occupancy(self) -> tuple[int, int] | None: ...

    def should_checkpoint(self, num_tokens: int, last: int | None = None) -> bool: ...

    def insert(self, state: PyTree, tokens: IntLike, row: int = 0) -> bool: ...


def marconi_checkpoint(seq: SequenceState, cache: Cache) -> SequenceState:
    """Keeps each sequence in `cache` if a checkpoint is due there; never fails for want of a slot.

    A cache without room keeps nothing. One whose pool is lost keeps nothing, warns why, and
    gives the sequence back as it was: a request does not depend on it.

    A checkpoint is due by the tokens the state holds, and is registered at exactly that
    count: a state labeled with fewer would apply some tokens twice.

    Args:
      seq: without an open window, so that only committed tokens are kept.
      cache: of the same backend.

    Raises:
      LifecycleError: a window is open.
      IdentityError: the cache is of another backend, or the sequence was patched, so that
        its state is not what its tokens give; see `seq.is_patched`.
    """
    check_sequence(seq)
    if not isinstance(cache, Cache):
        raise GeometryError(f"A checkpoint is kept in a prefix cache, but was given {type(cache).__name__}.")
    if seq.opened is not None:
        raise LifecycleError("A window is open: only committed tokens may enter a prefix cache. Resolve it first.")
    if cache.backend is not seq.backend:
        raise IdentityError(f"The cache is of {cache.backend!r}, another backend than the sequence's.")
    if seq.is_patched:
        paths = ", ".join(f"`{seq.backend.layout.paths[i]}`" for i in sorted(seq.patched))
        raise IdentityError(
            f"{paths} of this sequence was patched, so its state is not what its tokens give, and a cache would hand "
            "it to whoever asks for them. Go back to a checkpoint from before the patch, or leave the cache out while "
            "`seq.is_patched`."
        )
    marked = list(seq.marked or (0,) * len(seq.tokens))
    for row, tokens in enumerate(seq.tokens):
        if cache.should_checkpoint(len(tokens), marked[row]):
            try:
                kept = cache.insert(seq.state, tokens, row)
            except FencedError as lost:
                warnings.warn(f"No checkpoint of {len(tokens)} tokens was kept. {lost}", RuntimeWarning, stacklevel=2)
                return seq
            if kept:
                marked[row] = len(tokens) // cache.block_size
    return dataclasses.replace(seq, marked=tuple(marked))


def snapshot_occupancy(cache: Cache) -> tuple[int, int] | None:
    """Returns the cache's slots in use and in all; None if it has none. A ring never counts."""
    if not isinstance(cache, Cache):
        raise GeometryError(f"Occupancy is a prefix cache's, but was asked of {type(cache).__name__}.")
    return cache.occupancy()

"""What tokens add to a state: estimated from the geometry, and measured on states."""

from collections.abc import Sequence
from numbers import Integral
from types import NoneType

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import CapacityError
from statecore._typing import PyTree
from statecore.native._cache import IdentityCache
from statecore.native._estimate import checked_add, estimate, logical_rows
from statecore.state import Geometry, Layout, PlaneGeometry, equality

_MAX_LENGTH = np.iinfo(np.int32).max
_remembered = IdentityCache()


def estimate_growth(
    geometry: Geometry,
    length: int | Sequence[int] | np.ndarray,
    num_tokens: int,
    *,
    bucket: int | None = None,
    allocated: int | None = None,
) -> int | None:
    """Returns the bytes that `num_tokens` more tokens a sequence will add. Host only.

    Logical bytes: an append plane gains a row a token, a ring gains rows until its last
    `W - 1` are held, all else gains nothing, since it is there from the first token on.
    With `bucket`, allocated bytes instead: append planes grow in whole buckets, for all
    sequences alike, and nothing else grows.

    Args:
      geometry: of the state; its capacity is the most that append planes grow to.
      length: tokens held now, for all sequences or for each.
      num_tokens: tokens to come, for each sequence.
      bucket: rows that append planes grow by at a time; None prices logical rows.
      allocated: rows that append planes have now, which never shrink; those of the bucket
        of the longest sequence if None. Only with `bucket`.

    Returns:
      the bytes; None if a plane's size is not known, or if there is no such state to
      measure: lengths beyond int32 or the capacity, or bytes beyond 2**63 - 1.

    Raises:
      CapacityError: a length, a number of tokens or of rows is negative or no whole number.
    """
    # 5.0 and True have the hash of an int, and are to be refused whatever is remembered.
    if type(length) is int and type(num_tokens) is int and bucket is None and allocated is None:
        key = length, num_tokens
        return _remembered.get(
            geometry, key, lambda: _grown(geometry, (length,) * geometry.batch, num_tokens, None, None)
        )
    lengths = (length,) * geometry.batch if isinstance(length, int) else _as_tuple(length, geometry.batch)
    key = lengths, num_tokens, bucket, allocated
    if all(type(number) in (int, NoneType) for number in (*lengths, *key[1:])):
        return _remembered.get(geometry, key, lambda: _grown(geometry, *key))
    return _grown(geometry, *key)


def count_inputs(num_predictions: int, *, num_pending: int = 1) -> int:
    """Returns how many tokens enter a state while `num_predictions` are made.

    Each prediction feeds what is pending before it, and the last one predicted enters
    nothing: `P` pending tokens of a prompt and `k` predictions are `P + k - 1` inputs; a
    pending token of decoding is `P = 1`, hence `k` inputs; no prediction feeds nothing.

    Raises:
      CapacityError: a number is negative, or nothing is pending to predict from.
    """
    wrong = [number for number in (num_predictions, num_pending) if not _is_whole(number) or number < 0]
    if wrong or (num_predictions and not num_pending):
        raise CapacityError(
            f"Cannot count the inputs of {num_predictions!r} predictions from {num_pending!r} pending tokens: both are "
            "whole numbers of at least 0, and a prediction needs a pending token."
        )
    return num_pending + num_predictions - 1 if num_predictions else 0


def logical_bytes(layout: Layout, state: PyTree) -> int:
    """Returns the bytes of a state that can be read, counted on the state itself.

    Waits for the device. It asks `equal`'s own definition of what can be read, and not the
    arithmetic of `estimate_growth`, which can so be held against it.
    """
    leaves = layout.leaves(state)
    ones = [jnp.ones(leaf.shape, jnp.uint8) for leaf in leaves]
    ones[layout.position] = leaves[layout.position]
    counted = equality.readable(layout, ones)
    counted[layout.position] = jnp.ones_like(counted[layout.position])
    sizes = estimate(state)
    if sizes is None:
        raise CapacityError("The bytes of this state are unknown, as the storage of a plane's dtype is not known.")
    return sum(
        int(np.array(ones).sum(dtype=np.int64)) * (plane.allocated_bytes // leaf.size)
        for ones, plane, leaf in zip(counted, sizes.planes, leaves, strict=True)
        if leaf.size
    )


def measured_growth(layout: Layout, before: PyTree, after: PyTree, *, is_allocated: bool = False) -> int:
    """Returns the bytes that `after` has more than `before`, measured on the two states.

    Args:
      layout: of both; a backend has it as `backend.layout`.
      before: the earlier state.
      after: the later one.
      is_allocated: whether to measure buffers, for growth in buckets, not what can be read.
    """
    if not is_allocated:
        return logical_bytes(layout, after) - logical_bytes(layout, before)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(after)) - sum(leaf.nbytes for leaf in jax.tree.leaves(before))


def _as_tuple(length: Sequence[int] | np.ndarray, batch: int) -> tuple:
    if np.ndim(length) == 0:
        return (length,) * batch
    return tuple(length.tolist() if isinstance(length, np.ndarray) else length)


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _check_whole(geometry: Geometry, lengths: tuple, num_tokens: int, bucket: int | None, allocated: int | None):
    given = (*lengths, num_tokens, 1 if bucket is None else bucket, 0 if allocated is None else allocated)
    if not all(map(_is_whole, given)):
        raise CapacityError(f"Lengths, tokens and rows are whole numbers, but are {list(lengths)} and {given[-3:]}.")
    if min(given) < 0 or len(lengths) != geometry.batch or given[-2] < 1 or (bucket is None and allocated is not None):
        raise CapacityError(
            f"Cannot estimate {num_tokens} more tokens at lengths {list(lengths)}, bucket {bucket} and {allocated} "
            f"rows: lengths, tokens and rows must be at least 0, with one length for each of the {geometry.batch} "
            "sequences; a bucket has at least 1 row, and only with a bucket are rows allocated."
        )


def _grown(
    geometry: Geometry, lengths: tuple, num_tokens: int, bucket: int | None, allocated: int | None
) -> int | None:
    _check_whole(geometry, lengths, num_tokens, bucket, allocated)
    lengths, num_tokens = tuple(map(int, lengths)), int(num_tokens)
    if max(lengths) + num_tokens > _MAX_LENGTH:
        return None  # the position is int32
    sizes = []
    for plane in geometry.planes:
        if plane.plane.kind not in ("append", "sliding"):
            continue
        rows = _grown_rows(plane, lengths, num_tokens, bucket, allocated)
        if plane.row_nbytes is None or rows is None:
            return None
        sizes.append(plane.row_nbytes * rows)
    return checked_add(*sizes)


def _grown_rows(
    plane: PlaneGeometry, lengths: tuple[int, ...], num_tokens: int, bucket: int | None, allocated: int | None
) -> int | None:
    """Returns the rows added over all sequences; None if they do not fit."""
    now = [logical_rows(plane, length) for length in lengths]
    then = [logical_rows(plane, length + num_tokens) for length in lengths]
    known_now, known_then = ([rows for rows in counts if rows is not None] for counts in (now, then))
    if len(known_now) < len(now) or len(known_then) < len(then):
        return None
    if bucket is None:
        return sum(known_then) - sum(known_now)
    if plane.plane.kind == "sliding":
        return 0
    capacity = plane.shape[plane.plane.axis or 0]
    # One array holds all sequences, so that the longest one decides for each.
    start = _bucketed(max(known_now), bucket, capacity)
    start = min(capacity, max(start, allocated or 0))
    return (max(start, _bucketed(max(known_then), bucket, capacity)) - start) * len(lengths)


def _bucketed(length: int, bucket: int, capacity: int) -> int:
    return min(-(-length // bucket) * bucket, capacity)

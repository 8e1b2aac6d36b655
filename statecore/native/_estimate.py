"""What a copy costs and what tokens add, from the geometry alone."""

import dataclasses
from collections.abc import Sequence
from numbers import Integral

import numpy as np

from statecore._errors import CapacityError
from statecore.state import Geometry, PlaneGeometry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that a copy of a state costs.

    retained_bytes: kept as long as the copy lives.
    copy_bytes: moved once, for each attempt.
    """

    retained_bytes: int
    copy_bytes: int


def estimate(geometry: Geometry) -> Estimate | None:
    """Returns what a copy of such a state costs; None if a plane's size is not known.

    An unknown cost is not zero: refuse the copy, or measure it.
    """
    sizes = [plane.nbytes for plane in geometry.planes]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return Estimate(retained_bytes=sum(known), copy_bytes=sum(known))


def estimate_growth(geometry: Geometry, length: int | Sequence[int] | np.ndarray, num_tokens: int) -> int | None:
    """Returns the bytes of rows that `num_tokens` more tokens a sequence will hold.

    Logical bytes: an append plane gains a row a token, a ring gains rows until its last
    `W - 1` are held, all else gains nothing.

    Args:
      geometry: of the state.
      length: tokens held now, for all sequences or for each.
      num_tokens: tokens to come, for each sequence.

    Returns:
      the bytes; None if a plane's size is not known, or if length and
      tokens exceed the capacity, where there is no such state to measure.

    Raises:
      CapacityError: `length` or `num_tokens` is negative or no whole number.
    """
    lengths: list = [length] * geometry.batch if np.ndim(length) == 0 else list(np.array(length))
    if not all(isinstance(n, Integral) for n in (*lengths, num_tokens)):
        raise CapacityError(f"Lengths and tokens are whole numbers, but are {lengths} and {num_tokens!r}.")
    if num_tokens < 0 or len(lengths) != geometry.batch or not all(n >= 0 for n in lengths):
        raise CapacityError(
            f"Cannot estimate {num_tokens} more tokens at lengths {lengths}: both must be at least 0, with one "
            f"length for each of the {geometry.batch} sequences."
        )
    total, num_tokens = 0, int(num_tokens)
    for plane in geometry.planes:
        if plane.plane.kind not in ("append", "sliding"):
            continue
        grown = [_grown_rows(plane, int(n), num_tokens) for n in lengths]
        if plane.row_nbytes is None or any(rows is None for rows in grown):
            return None
        total += plane.row_nbytes * sum(rows for rows in grown if rows is not None)
    return total


def _grown_rows(plane: PlaneGeometry, length: int, num_tokens: int) -> int | None:
    axis, size = plane.plane.axis, plane.plane.size
    if axis is None:
        return None
    if plane.plane.kind == "sliding":
        most = (size or 1) - 1
        return min(length + num_tokens, most) - min(length, most)
    return num_tokens if length + num_tokens <= plane.shape[axis] else None

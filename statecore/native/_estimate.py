"""What a copy of a state costs, from shapes, dtypes and shardings alone."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from statecore._errors import GeometryError
from statecore._pytree import named_leaves
from statecore._typing import IntLike, PyTree
from statecore.backend import checks
from statecore.native._cache import IdentityCache
from statecore.state import Geometry, PlaneGeometry, planes

# A `jax.Device`, of which nothing is asked but its number.
Device: TypeAlias = Any

_remembered = IdentityCache()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaneBytes:
    """Bytes of one plane.

    path: of the plane.
    kind: of the plane; None where only shapes were given.
    allocated_bytes: of the whole array.
    logical_bytes: of what can be read at the lengths given; None if none were.
    """

    path: str
    kind: str | None
    allocated_bytes: int
    logical_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that a copy of a state costs. Two estimates are equal if their two costs are.

    retained_bytes: kept as long as the copy lives.
    copy_bytes: moved once, for each attempt.
    allocated_bytes: of all arrays; None if the estimate was made by hand.
    logical_bytes: of what can be read at the lengths that were given; None if none were.
    planes: the same, plane by plane.
    per_device: bytes that each device allocates, replicas counted on each; None where the
      shardings are not known.
    """

    retained_bytes: int
    copy_bytes: int
    allocated_bytes: int | None = dataclasses.field(default=None, compare=False)
    logical_bytes: int | None = dataclasses.field(default=None, compare=False)
    planes: tuple[PlaneBytes, ...] = dataclasses.field(default=(), compare=False, repr=False)
    per_device: tuple[tuple[Device, int], ...] | None = dataclasses.field(default=None, compare=False, repr=False)


def estimate(
    geometry: Geometry | PyTree,
    *,
    lengths: IntLike | None = None,
    shardings: Sequence[Any] | None = None,
) -> Estimate | None:
    """Returns what a copy of such a state costs; None if a plane's size is not known. Host only.

    Compiles nothing and asks no device. An unknown cost is not zero: refuse the copy, or
    measure it. For one geometry object a repeated call is answered from memory.

    Args:
      geometry: of the state, or the state itself, or its `jax.ShapeDtypeStruct` leaves.
        Without a geometry nothing says what can be read, so `logical_bytes` is None.
      lengths: tokens held, for all sequences or for each, to price what can be read.
      shardings: one a plane, in the geometry's order; leaves bring their own.

    Raises:
      GeometryError: a leaf has no shape and dtype, or not one sharding a plane was given;
        a length is negative or no whole number.
    """
    if not isinstance(geometry, Geometry):
        named = named_leaves(geometry)
        own = [getattr(leaf, "sharding", None) for _, leaf in named] if shardings is None else shardings
        return _priced([_as_plane(path, leaf) for path, leaf in named], None, own, 0)
    if lengths is not None:
        lengths = _whole_lengths(lengths, geometry.batch)
    shardings = None if shardings is None else tuple(shardings)
    price = functools.partial(_priced, geometry.planes, lengths, shardings, geometry.batch)
    return _remembered.get(geometry, (lengths, shardings), price)


def _whole_lengths(lengths: IntLike, batch: int) -> tuple[int, ...]:
    array = checks.host_ints(lengths, "lengths")
    if array.ndim == 0:
        array = np.full(batch, array)
    if array.shape != (batch,):
        raise GeometryError(f"{array.size} lengths were given for {batch} sequences; give one for each, or one int.")
    if (array < 0).any():
        raise GeometryError(
            f"lengths are {array.tolist()}, but no sequence holds less than 0 tokens. A negative position marks a "
            "transition that was refused inside a trace."
        )
    return tuple(array.tolist())


def logical_rows(plane: PlaneGeometry, length: int) -> int | None:
    """Returns how many rows of a sequence of `length` tokens can be read in an append or sliding plane.

    None where there is no such state: the length exceeds the plane's rows.
    """
    axis, size = plane.plane.axis, plane.plane.size
    if axis is None:
        return None
    if plane.plane.kind == "sliding":
        # A token sees the last W, itself included, so that W - 1 are left of a full window.
        return min(length, (size or 1) - 1)
    return length if length <= plane.shape[axis] else None


def _as_plane(path: str, leaf: Any) -> PlaneGeometry:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise GeometryError(f"Plane `{path}` must be an array or a `jax.ShapeDtypeStruct`, but is {leaf!r}.")
    return PlaneGeometry(path=path, plane=planes.constant(batch_axis=None), shape=tuple(leaf.shape), dtype=leaf.dtype)


def _priced(
    geometries: Sequence[PlaneGeometry], lengths: tuple[int, ...] | None, shardings: Sequence[Any] | None, batch: int
) -> Estimate | None:
    if shardings is not None and len(shardings) != len(geometries):
        raise GeometryError(f"{len(shardings)} shardings were given for {len(geometries)} planes; give one a plane.")
    if any(plane.nbytes is None for plane in geometries):
        return None
    by_plane = tuple(_plane_bytes(plane, lengths, batch > 0) for plane in geometries)
    allocated = sum(plane.allocated_bytes for plane in by_plane)
    logical = [plane.logical_bytes for plane in by_plane]
    known = [size for size in logical if size is not None]
    return Estimate(
        retained_bytes=allocated,
        copy_bytes=allocated,
        allocated_bytes=allocated,
        logical_bytes=sum(known) if lengths is not None and len(known) == len(logical) else None,
        planes=by_plane,
        per_device=None if shardings is None else _per_device(geometries, shardings),
    )


def _plane_bytes(plane: PlaneGeometry, lengths: tuple[int, ...] | None, has_kind: bool) -> PlaneBytes:
    allocated, logical = plane.nbytes or 0, None
    if lengths is not None and plane.plane.kind in ("append", "sliding"):
        rows = [logical_rows(plane, length) for length in lengths]
        known = [count for count in rows if count is not None]
        if plane.row_nbytes is not None and len(known) == len(rows):
            logical = plane.row_nbytes * sum(known)
    elif lengths is not None:
        logical = allocated
    kind = plane.plane.kind if has_kind else None
    return PlaneBytes(path=plane.path, kind=kind, allocated_bytes=allocated, logical_bytes=logical)


def _per_device(geometries: Sequence[PlaneGeometry], shardings: Sequence[Any]) -> tuple[tuple[Device, int], ...] | None:
    """Returns the bytes of each device's shards; a replica counts on each device that has it."""
    found: dict[Device, int] = {}
    for plane, sharding in zip(geometries, shardings, strict=True):
        if sharding is None:
            return None
        # Not `plane.nbytes` over the number of devices: a dimension may not be split at all.
        size = dataclasses.replace(plane, shape=tuple(sharding.shard_shape(plane.shape))).nbytes
        for device in sharding.device_set:
            found[device] = found.get(device, 0) + (size or 0)
    return tuple(sorted(found.items(), key=lambda item: item[0].id))


def checked_add(*sizes: int) -> int | None:
    """Returns the sum of sizes in bytes; None if it passes 2**63 - 1, which nothing can hold."""
    total = sum(sizes)
    return total if total <= np.iinfo(np.int64).max else None

"""The geometry of a state: planes, shapes and dtypes, without a single array."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError
from statecore._pytree import check_alive, named_leaves
from statecore._typing import PyTree
from statecore.state._address import layer_faults
from statecore.state._layout import Layout
from statecore.state._notebook import notebook_html
from statecore.state.planes import Plane


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaneGeometry:
    """One plane of a geometry.

    path: where it is in the state.
    plane: how it changes.
    shape: all axes, the batch's and the layers' included.
    dtype: the dtype, extended ones (PRNG keys) included.
    """

    path: str
    plane: Plane
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole plane; None where the dtype's storage is not known."""
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return math.prod(self.shape) * self.dtype.itemsize
        if jnp.issubdtype(self.dtype, jnp.integer) or jnp.issubdtype(self.dtype, jnp.floating):
            bits = (jnp.iinfo if jnp.issubdtype(self.dtype, jnp.integer) else jnp.finfo)(self.dtype).bits
            if bits % 8:
                return None  # whether int4 is packed depends on the device
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def row_nbytes(self) -> int | None:
        """Bytes that one token of one sequence takes in an `append` or `sliding` plane."""
        if self.nbytes is None or self.plane.axis is None or self.plane.batch_axis is None:
            return None
        extents = self.shape[self.plane.axis] * self.shape[self.plane.batch_axis]
        return self.nbytes // extents if extents else 0

    def describe(self) -> str:
        """Returns the dtype and shape as text: `float32[2,256,8]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The array-free, hashable description of a state, from a backend's `init`.

    name: the backend's name.
    layout: the structure and the planes.
    planes: shape and dtype of each plane, in the layout's order.
    batch: sequences `B`.
    capacity: tokens `S` that `init` was asked for.
    trace_nbytes: bytes that the backend's own verify keeps, fixed and for each row of a
      window; None without one. No part of the state, so it does not count in comparisons.
    """

    name: str
    layout: Layout
    planes: tuple[PlaneGeometry, ...]
    batch: int
    capacity: int
    trace_nbytes: tuple[int, int] | None = dataclasses.field(default=None, compare=False)

    def struct(self) -> PyTree:
        """Returns the state as `jax.ShapeDtypeStruct` leaves."""
        leaves = [jax.ShapeDtypeStruct(plane.shape, plane.dtype) for plane in self.planes]
        return jax.tree.unflatten(self.layout.treedef, leaves)

    def differences(self, other: "Geometry") -> list[str]:
        """Returns what differs from `other`, a sentence a plane; empty if nothing does."""
        ours = {plane.path: plane for plane in self.planes}
        theirs = {plane.path: plane for plane in other.planes}
        found = [f"`{path}` is missing" for path in ours.keys() - theirs.keys()]
        found += [f"`{path}` is unexpected" for path in theirs.keys() - ours.keys()]
        for path in (path for path in ours if path in theirs):
            mine, its = ours[path], theirs[path]
            if (mine.shape, mine.dtype) != (its.shape, its.dtype):
                found.append(f"`{path}` is {its.describe()} instead of {mine.describe()}")
            elif mine.plane != its.plane:
                found.append(f"`{path}` is declared {its.plane} instead of {mine.plane}")
        if not found and self.layout.treedef != other.layout.treedef:
            found.append(f"the structure is {other.layout.treedef} instead of {self.layout.treedef}")
        return sorted(found)

    def _repr_html_(self) -> str:
        return notebook_html("show_geometry", self)

    def __str__(self) -> str:
        rows = [("plane", "kind", "dtype and shape", "bytes", "undone by")]
        for plane in self.planes:
            size = "unknown" if plane.nbytes is None else f"{plane.nbytes:,}"
            rows.append((plane.path, plane.plane.kind, plane.describe(), size, plane.plane.undone_by))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return f"{self.name}: batch {self.batch}, capacity {self.capacity}\n" + "\n".join(lines)


def make_geometry(name: str, layout: Layout, struct: PyTree, batch: int, capacity: int) -> Geometry:
    """Returns the geometry of a state with the shapes and dtypes of `struct`.

    Raises:
      GeometryError: the structure is not the layout's, an axis does not exist, a batch
        axis is not `batch` long, the position is not int32 `[B]`, or a ring has fewer
        rows than its window.
    """
    leaves = layout.leaves(struct)
    faults = []
    for path, plane, leaf in zip(layout.paths, layout.planes, leaves, strict=True):
        faults += [f"`{path}` {fault}" for fault in _plane_faults(plane, leaf, batch)]
    if faults:
        raise GeometryError(f"The planes of {name} do not describe its state: " + "; ".join(faults) + ".")
    planes = tuple(
        PlaneGeometry(path=path, plane=plane, shape=tuple(leaf.shape), dtype=leaf.dtype)
        for path, plane, leaf in zip(layout.paths, layout.planes, leaves, strict=True)
    )
    return Geometry(name=name, layout=layout, planes=planes, batch=batch, capacity=capacity)


def _plane_faults(plane: Plane, leaf: Any, batch: int) -> list[str]:
    shape = tuple(leaf.shape)
    if plane.kind == "position":
        if shape == (batch,) and leaf.dtype == jnp.int32:
            return []
        return [f"is {leaf.dtype}{list(shape)}, but a position is int32[{batch}]"]
    faults = []
    named = (("batch_axis", plane.batch_axis), ("axis", plane.axis), ("layer_axis", plane.layer_axis))
    for label, axis in named:
        if axis is not None and not -len(shape) <= axis < len(shape):
            faults.append(f"has {len(shape)} axes, but {label} is {axis}")
    if faults:
        return faults
    if plane.batch_axis is not None and shape[plane.batch_axis] != batch:
        faults.append(f"has shape {list(shape)}, but axis {plane.batch_axis} should be the batch of {batch}")
    if plane.axis is not None and plane.batch_axis is not None:
        if plane.axis % len(shape) == plane.batch_axis % len(shape):
            faults.append(f"has axis {plane.axis} both for rows and for the batch")
    if plane.kind == "sliding" and plane.axis is not None:
        rows, size = shape[plane.axis], plane.size or 0
        if size < 1 or rows < size:
            faults.append(f"has a ring of {rows} rows for a window of {size}; it needs 1 <= window <= rows")
    return faults + layer_faults(plane, shape)


def state_geometry(layout: Layout, state: PyTree, name: str = "state") -> Geometry:
    """Returns the geometry that `state` has, capacity taken from its append planes."""
    leaves = layout.leaves(state)
    batch = leaves[layout.position].shape[0]
    return make_geometry(name, layout, state, batch, layout.capacity(leaves) or 0)


def validate(geometry: Geometry, state: PyTree) -> None:
    """Checks that `state` is alive and has exactly this geometry. Reads no values.

    Args:
      geometry: from the backend or the registry, never from the state itself.
      state: what to check.

    Raises:
      StateConsumedError: a plane's buffer has been donated.
      GeometryError: names every plane whose presence, shape or dtype is wrong.
    """
    check_alive(named_leaves(state))
    found = {path: leaf for path, leaf in named_leaves(state)}
    faults = [f"`{path}` is unexpected" for path in found if path not in geometry.layout.paths]
    for plane in geometry.planes:
        if plane.path not in found:
            faults.append(f"`{plane.path}` is missing")
            continue
        leaf = found[plane.path]
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if (shape, dtype) != (plane.shape, plane.dtype):
            given = f"{dtype}[{','.join(map(str, shape))}]" if shape is not None else repr(leaf)
            faults.append(f"`{plane.path}` is {given}, but must be {plane.describe()}")
    if not faults and jax.tree.structure(state) != geometry.layout.treedef:
        faults.append(f"the structure is {jax.tree.structure(state)}, but must be {geometry.layout.treedef}")
    if faults:
        raise GeometryError(
            f"This state is not one of {geometry.name} at batch {geometry.batch} and capacity "
            f"{geometry.capacity}: " + "; ".join(faults) + ". Was it made by another model, batch or capacity?"
        )

"""The planes of a state as flat tuples: which leaf is what, and where the rows are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from statecore._errors import GeometryError
from statecore._pytree import named_leaves, path_name
from statecore._typing import PyTree
from statecore.state.planes import Plane


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tree of planes, flattened once. Leaf `i` of a state is plane `i`.

    treedef: the structure that every state has.
    paths: the path of each plane, as text.
    planes: how each plane changes.
    """

    treedef: Any  # jax.tree_util.PyTreeDef
    paths: tuple[str, ...]
    planes: tuple[Plane, ...]

    @functools.cached_property
    def position(self) -> int:
        """The index of the position plane."""
        return next(i for i, plane in enumerate(self.planes) if plane.kind == "position")

    def indices(self, *kinds: str) -> tuple[int, ...]:
        """Returns the indices of the planes of these kinds."""
        return tuple(i for i, plane in enumerate(self.planes) if plane.kind in kinds)

    def leaves(self, state: PyTree) -> list[jax.Array]:
        """Returns the leaves of `state`; raises GeometryError if it is built otherwise."""
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self.treedef:
            raise GeometryError(_structure_fault(self, state))
        return leaves

    def named(self, state: PyTree) -> list[tuple[str, jax.Array]]:
        """Returns the leaves of `state` with the paths of their planes."""
        return list(zip(self.paths, self.leaves(state), strict=True))

    def unflatten(self, leaves: list[jax.Array]) -> PyTree:
        """Returns the state that has these leaves."""
        return jax.tree.unflatten(self.treedef, leaves)

    def lengths(self, state: PyTree) -> jax.Array:
        """Returns the position plane of `state`, `[B]`; negative where it was refused."""
        return self.leaves(state)[self.position]

    def with_lengths(self, state: PyTree, lengths: jax.Array) -> PyTree:
        """Returns `state` with another position plane."""
        leaves = self.leaves(state)
        leaves[self.position] = lengths
        return self.unflatten(leaves)

    def capacity(self, leaves: list[jax.Array]) -> int | None:
        """Returns how many tokens the append planes hold, None if there are none."""
        extents = [leaves[i].shape[row_axis(self.planes[i], leaves[i])] for i in self.indices("append")]
        return min(extents, default=None)

    def undo_limit(self, leaves: list[jax.Array]) -> tuple[int, str] | None:
        """Returns the widest window that the rings can undo, and the path that limits it."""
        limits = [
            (leaves[i].shape[row_axis(plane, leaves[i])] - (plane.size or 0) + 1, self.paths[i])
            for i, plane in enumerate(self.planes)
            if plane.kind == "sliding"
        ]
        return min(limits, default=None)


def row_axis(plane: Plane, leaf: jax.Array) -> int:
    """Returns the axis of a plane's rows, counted from the front."""
    assert plane.axis is not None  # append, sliding and shift always have one
    return plane.axis % leaf.ndim


def along(index: jax.Array, axis: int, num_axes: int) -> jax.Array:
    """Returns `index` `[B]` with its axis at `axis` and `num_axes` axes in all."""
    return jax.lax.broadcast_in_dim(index, tuple(index.shape[0] if i == axis else 1 for i in range(num_axes)), (axis,))


def per_row(plane: Plane, leaf: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `index` `[B]` shaped to broadcast against `leaf` along its batch axis."""
    assert plane.batch_axis is not None  # a shared plane never has row data
    return along(index, plane.batch_axis % leaf.ndim, leaf.ndim)


def make_layout(planes: PyTree) -> Layout:
    """Returns the layout of a tree of planes.

    Raises:
      GeometryError: a leaf is no plane, or there is not exactly one position.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(planes)
    paths = tuple(path_name(path) for path, _ in flat)
    for path, plane in zip(paths, flat, strict=True):
        if not isinstance(plane[1], Plane):
            raise GeometryError(
                f"`planes` has {plane[1]!r} at `{path}`, but every leaf must be made by "
                "`statecore.planes`, such as `pl.recurrent()`."
            )
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise GeometryError(f"Two planes have the path `{twice[0]}`; name the parts of the state so that paths differ.")
    positions = [path for path, (_, plane) in zip(paths, flat, strict=True) if plane.kind == "position"]
    if len(positions) != 1:
        found = ", ".join(positions) or "none"
        raise GeometryError(
            f"`planes` must have exactly one position plane, but has {len(positions)} "
            f"({found}). One length per sequence holds for every plane."
        )
    return Layout(treedef, paths, tuple(plane for _, plane in flat))


def _structure_fault(layout: Layout, state: PyTree) -> str:
    found = [name for name, _ in named_leaves(state)]
    missing = [path for path in layout.paths if path not in found]
    unexpected = [path for path in found if path not in layout.paths]
    return (
        "The state does not mirror the backend's `planes`: "
        f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}, "
        f"structure {jax.tree.structure(state)} instead of {layout.treedef}. "
        "Was it made by another backend?"
    )


def take_row(plane: Plane, leaf: jax.Array, row: jax.Array) -> jax.Array:
    """Returns row `row` `[B]` along the plane's axis, one a sequence; `set_row` takes it back."""
    return leaf.at[_row_index(plane, leaf, row)].get(mode="clip")


def set_row(plane: Plane, leaf: jax.Array, row: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `leaf` with row `row` `[B]` replaced by `value`, shaped as `take_row` gives it."""
    return leaf.at[_row_index(plane, leaf, row)].set(value, mode="drop")


def choose_row(plane: Plane, leaf: jax.Array, chosen: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns row `a` for the sequences where `chosen` `[B]`, else row `b`; both from `take_row`."""
    assert plane.batch_axis is not None
    batch_axis, axis = plane.batch_axis % leaf.ndim, row_axis(plane, leaf)
    # Two index arrays side by side leave their axis in place; apart, it comes first.
    place = min(batch_axis, axis) if abs(batch_axis - axis) == 1 else 0
    return jnp.where(along(chosen, place, a.ndim), a, b)


def _row_index(plane: Plane, leaf: jax.Array, row: jax.Array) -> tuple:
    assert plane.batch_axis is not None
    index: list = [slice(None)] * leaf.ndim
    index[plane.batch_axis % leaf.ndim] = jnp.arange(row.shape[0])
    index[row_axis(plane, leaf)] = row
    return tuple(index)

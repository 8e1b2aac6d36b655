"""Editing a state as a value: one plane or one layer of it, or a mixture of two states."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, UnsupportedError
from statecore._pytree import check_alive, check_kept, copy_leaves, is_traced
from statecore._typing import PyTree
from statecore.state import _equality as equality
from statecore.state._address import Part, find_part, layer_faults, leaf_paths, may_be_position
from statecore.state._layout import Layout, make_layout, per_row
from statecore.state._marks import is_marked, mark


class HasLayout(Protocol):
    """What knows the planes of a state: a backend, or a geometry."""

    @property
    def layout(self) -> Layout: ...


def patch(
    state: PyTree, path: str, fn: Callable[[jax.Array], Any], *, planes: "HasLayout | PyTree | None" = None
) -> PyTree:
    """Returns `state` with `fn` applied to one plane or one layer's part of it. Donates nothing.

    The result shares no buffer with `state` and is marked: no tokens made it, so it enters
    no prefix cache. Works inside `jit` and `grad`, where nothing is marked.

    Args:
      state: any state.
      path: a plane, `hidden`; a layer's part, `layers.3.hidden`; or a place in the stack,
        `hidden[2]`.
      fn: takes the part, returns one of the same shape and dtype.
      planes: what the planes are: a backend, a geometry, or the tree of planes. Needed for
        the names of layers, and to tell the position from other int32 `[B]` planes.

    Raises:
      GeometryError: nothing has this name (the near ones are named), or `fn` returned
        another shape or dtype.
      UnsupportedError: the plane is the position, or may be it as far as anybody said.
      StateConsumedError: the state was donated.
    """
    part, leaves, treedef = _located(state, path, planes)
    old = part.read(leaves[part.leaf])
    marked = [i for i, leaf in enumerate(leaves) if is_marked(leaf)]
    # A copy: a function that donates its argument would take the state's own plane with it.
    leaves[part.leaf] = part.write(leaves[part.leaf], _checked(part, old, fn(jnp.copy(old))))
    if not is_traced(leaves):
        leaves = copy_leaves(leaves)
        mark([leaves[i] for i in {part.leaf, *marked}])
    return jax.tree.unflatten(treedef, leaves)


def interpolate(a: PyTree, b: PyTree, weight: Any, *, planes: "HasLayout | PyTree", attention: bool = False) -> PyTree:
    """Returns the state `a + weight (b - a)` of two states of equal lengths. Donates nothing.

    Mixed are the floating recurrent and shift planes; everything else that can be read must
    be equal in both. At weight 0 the result has the bits of `a`, at 1 those of `b`. It is
    marked as `patch` marks. Inside a trace, what would raise marks the state as refused
    instead, as transitions do, and leaves it `a`.

    Args:
      a: of `B` sequences.
      b: of the same geometry and lengths.
      weight: from 0 to 1: a number, or `[B]`.
      planes: what the planes are: a backend, a geometry, or the tree of planes.
      attention: mix the floating append and sliding planes too.

    Raises:
      GeometryError: the geometries differ, a plane that is not mixed differs, or the weight
        is not `[B]`.
      UnsupportedError: a weight is not between 0 and 1, or no plane can be mixed.
      StateConsumedError: one of the states was donated.
    """
    layout = layout_of(planes)
    for name, state in (("first state", a), ("second state", b)):
        check_alive(layout.named(state), name)
        check_kept(layout.named(state))
    check_same_geometry(layout, a, b)
    left, right = layout.leaves(a), layout.leaves(b)
    mixed = _mixed_planes(layout, left, attention)
    weights = _weights(weight, left[layout.position].shape)
    faults = _faults(layout, left, right, weights, mixed)
    leaves = list(left)
    for i in mixed:
        leaves[i] = _mix(left[i], right[i], per_row(layout.planes[i], left[i], weights))
    if is_traced(leaves, faults):
        return layout.unflatten(_refused_if(layout, faults, left, leaves))
    _raise_faults(layout, faults, weights)
    leaves = copy_leaves(leaves)
    mark([leaves[i] for i in mixed])
    return layout.unflatten(leaves)


def layout_of(planes: Any) -> Layout:
    """Returns the layout that a backend or a geometry has, or that a tree of planes makes."""
    if isinstance(planes, Layout):
        return planes
    layout = getattr(planes, "layout", None)
    return layout if isinstance(layout, Layout) else make_layout(planes)


def check_same_geometry(layout: Layout, a: PyTree, b: PyTree, *, ignore_rows: bool = False) -> None:
    """Raises GeometryError unless two states have the same shapes and dtypes, every fault by its path."""
    faults = []
    for path, plane, left, right in zip(layout.paths, layout.planes, layout.leaves(a), layout.leaves(b), strict=True):
        shapes = [list(left.shape), list(right.shape)]
        if ignore_rows and plane.kind in ("append", "sliding") and left.ndim == right.ndim:
            for shape in shapes:
                shape[plane.axis or 0] = -1
        if shapes[0] != shapes[1] or left.dtype != right.dtype:
            faults.append(f"`{path}` is {_described(left)} in the first and {_described(right)} in the second")
    if faults:
        raise GeometryError(
            f"These two states have different geometries: {'; '.join(faults)}. Are both of one backend, batch and "
            "capacity?"
        )


def _described(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


# Patching.


def _located(state: PyTree, path: str, planes: Any) -> tuple[Part, list[Any], Any]:
    """Returns the part that `path` names, the leaves of the state and its structure."""
    if planes is None:
        paths, leaves, treedef = leaf_paths(state)
        part = find_part(paths, None, path)
    else:
        layout = layout_of(planes)
        paths, leaves, treedef = layout.paths, layout.leaves(state), layout.treedef
        part = find_part(paths, layout.planes, path)
    check_alive(zip(paths, leaves, strict=True))
    check_kept(zip(paths, leaves, strict=True))
    leaf = leaves[part.leaf]
    if may_be_position(part, leaf):
        sure = "is the position" if part.plane else "may be the position (int32[B]), as far as anybody said"
        raise UnsupportedError(
            f"`{part.path}` {sure}: every other plane goes by it, so it is not edited. Use `rollback` or `take_rows`, "
            "or give `planes=` if it is something else."
        )
    faults = layer_faults(part.plane, leaf.shape) if part.place is not None and part.plane else []
    if faults:
        raise GeometryError(f"`{part.name}` cannot be found: `{part.path}` {'; '.join(faults)}.")
    return part, leaves, treedef


def _checked(part: Part, old: jax.Array, new: Any) -> jax.Array:
    found = (np.shape(new), getattr(new, "dtype", None))
    if found != (old.shape, old.dtype):
        shown = _described(new) if hasattr(new, "dtype") and hasattr(new, "shape") else f"{new!r}"[:80]
        raise GeometryError(
            f"The patch of `{part.name}` gave {shown}, but the part is {_described(old)}. Return an array of the same "
            "shape and dtype, such as `jnp.zeros_like(part)`."
        )
    # A weak type would compile every later transition once more.
    return jax.lax.convert_element_type(new, old.dtype) if getattr(new, "weak_type", False) else jnp.asarray(new)


# Mixing.


def _mixed_planes(layout: Layout, leaves: list[jax.Array], attention: bool) -> list[int]:
    kinds = ("recurrent", "shift", *(("append", "sliding") if attention else ()))
    mixed = [i for i in layout.indices(*kinds) if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]
    if not mixed:
        raise UnsupportedError(
            f"Nothing can be mixed: no plane of {list(layout.paths)} is floating and of the kinds {', '.join(kinds)}. "
            "`attention=True` mixes attention rows too."
        )
    return mixed


def _weights(weight: Any, shape: tuple[int, ...]) -> jax.Array:
    array = jnp.asarray(weight)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise UnsupportedError(f"The weight is {array.dtype}, but a mixture is between 0 and 1.")
    array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    if array.shape not in ((), shape):
        raise GeometryError(f"The weight has shape {list(array.shape)}, but must be one number, or {list(shape)}.")
    return jnp.broadcast_to(array, shape)


def _faults(layout: Layout, a: list, b: list, weights: jax.Array, mixed: list[int]) -> list[jax.Array]:
    """Returns, plane by plane, whether it must be equal and is not; last, whether a weight is out of range."""
    differs = equality.plane_differs(layout, a, b)
    wrong = [jnp.zeros((), bool) if i in mixed else differ for i, differ in enumerate(differs)]
    return [*wrong, ~jnp.all((weights >= 0) & (weights <= 1))]


@jax.custom_jvp
@jax.jit  # as one, so that the bits are those that it has inside a larger jit
def _mix(a: jax.Array, b: jax.Array, weight: jax.Array) -> jax.Array:
    # The ends are chosen, not computed: a + (b - a) rounds, and an infinity would give NaN.
    mixed = jnp.where((a == b) & jnp.isinf(a), a, _line(a, b, weight).astype(a.dtype))
    return jnp.where(weight == 0, a, jnp.where(weight == 1, b, mixed))


@_mix.defjvp
def _mix_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """The derivative of the line itself, which choosing an end does not have."""
    a, b, weight = primals
    to_a, to_b, along = tangents
    wide = jnp.promote_types(a.dtype, jnp.float32)
    slope = along.astype(wide) * (b.astype(wide) - a.astype(wide))
    return _mix(a, b, weight), (_line(to_a, to_b, weight) + slope).astype(a.dtype)


def _line(a: jax.Array, b: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `a + weight * (b - a)` in at least float32, so that it is rounded once and differences fit."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b, weight = a.astype(wide), b.astype(wide), weight.astype(wide)
    # Between numbers of different signs the difference may overflow, and this sum cannot.
    return jnp.where(jnp.sign(a) * jnp.sign(b) < 0, (1 - weight) * a + weight * b, a + weight * (b - a))


def _refused_if(layout: Layout, faults: list[jax.Array], a: list, leaves: list) -> list[jax.Array]:
    refused = jnp.any(jnp.stack(faults))
    kept = [leaf if leaf is old else jnp.where(refused, old, leaf) for old, leaf in zip(a, leaves, strict=True)]
    lengths = kept[layout.position]
    kept[layout.position] = jnp.where(refused & (lengths >= 0), ~lengths, lengths)
    return kept


def _raise_faults(layout: Layout, faults: list[jax.Array], weights: jax.Array) -> None:
    *planes, weight_is_wrong = (bool(fault) for fault in faults)
    if weight_is_wrong:
        raise UnsupportedError(f"The weight is {np.array(weights).tolist()}, but a mixture is between 0 and 1.")
    wrong = [path for path, differs in zip(layout.paths, planes, strict=True) if differs]
    if layout.paths[layout.position] in wrong:
        raise GeometryError("The two states hold different numbers of tokens, so they are not of one moment.")
    if wrong:
        raise GeometryError(
            f"{', '.join(f'`{path}`' for path in wrong)} differs between the states and is not mixed, so the result "
            "would be neither's. Feed both the same tokens, or mix attention rows with `attention=True`."
        )

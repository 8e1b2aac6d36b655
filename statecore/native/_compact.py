"""Append planes cut to the rows in use, and brought to another capacity."""

import dataclasses
from collections.abc import Sequence
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import CapacityError, UnsupportedError
from statecore._pytree import check_alike, check_alive, check_kept, check_unaliased, is_traced
from statecore._typing import PyTree
from statecore.backend import Backend, checks
from statecore.state import Geometry, Layout, row_axis

# Fewer rows than this are not worth an executable of their own.
MIN_ROWS = 16


def bucket_rows(length: int, capacity: int | None = None) -> int:
    """Returns the rows of a compact capture: the power of two that holds `length`, from 16 to `capacity`."""
    rows = max(MIN_ROWS, 1 << max(length - 1, 0).bit_length())
    return rows if capacity is None else min(rows, capacity)


def cut_geometry(geometry: Geometry, num_rows: int) -> Geometry:
    """Returns the geometry of a state whose append planes have at most `num_rows` rows."""
    cut = []
    for plane in geometry.planes:
        if plane.plane.kind == "append" and plane.plane.axis is not None:
            shape = list(plane.shape)
            shape[plane.plane.axis] = min(shape[plane.plane.axis], num_rows)
            plane = dataclasses.replace(plane, shape=tuple(shape))
        cut.append(plane)
    return dataclasses.replace(geometry, planes=tuple(cut), capacity=min(geometry.capacity, num_rows))


def row_extents(geometry: Geometry) -> tuple[int | None, ...]:
    """Returns the rows of each append plane of a geometry, and None for other planes."""
    return tuple(
        plane.shape[plane.plane.axis] if plane.plane.kind == "append" and plane.plane.axis is not None else None
        for plane in geometry.planes
    )


def resize(backend: Backend, state: PyTree, extents: tuple[int | None, ...], *, into: PyTree | None = None) -> PyTree:
    """Returns a copy of `state` whose append planes have `extents` rows. Donates `into`, never `state`.

    Checks of `state` nothing but that it is alive; the caller knows that the lengths fit.
    New rows are zeros and never read.

    Raises:
      StateConsumedError: `state` or `into` was donated before.
      GeometryError: `into` has other shapes than the result.
      AliasError: `into` shares a buffer with `state` or with itself.
    """
    layout = backend.layout
    if is_traced(state):
        return layout.unflatten(_resized(layout, layout.leaves(state), extents))
    check_alive(layout.named(state))
    check_kept(layout.named(state))
    if into is None:
        run = backend.compile(
            ("resize", extents), lambda: jax.jit(lambda leaves: _resized(layout, leaves, extents), keep_unused=True)
        )
        return layout.unflatten(run(layout.leaves(state)))
    target = layout.leaves(into)
    check_alive(zip(layout.paths, target, strict=True), "destination")
    check_alike(resize_struct(layout, state, extents), into, "`into`")
    check_unaliased(layout.named(state) + [(f"into.{p}", leaf) for p, leaf in zip(layout.paths, target, strict=True)])
    run = backend.compile(("resize", extents, "into"), lambda: _into(layout, extents))
    resized = run(target, layout.leaves(state))
    consume(target)
    return layout.unflatten(resized)


def _into(layout: Layout, extents: tuple[int | None, ...]):
    def body(target, leaves):
        del target  # its buffers take the result
        return _resized(layout, leaves, extents)

    return jax.jit(body, donate_argnums=(0,), keep_unused=True)


def resize_struct(layout: Layout, state: PyTree, extents: tuple[int | None, ...]) -> PyTree:
    """Returns the shapes and dtypes that `resize` would give."""
    leaves = layout.leaves(state)
    shapes = [list(leaf.shape) for leaf in leaves]
    for plane, leaf, shape, extent in zip(layout.planes, leaves, shapes, extents, strict=True):
        if extent is not None:
            shape[row_axis(plane, leaf)] = extent
    structs = [jax.ShapeDtypeStruct(tuple(shape), leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
    return jax.tree.unflatten(layout.treedef, structs)


def _resized(layout: Layout, leaves: list[jax.Array], extents: tuple[int | None, ...]) -> list[jax.Array]:
    resized = []
    for plane, leaf, extent in zip(layout.planes, leaves, extents, strict=True):
        if extent is not None:
            leaf = _with_rows(leaf, row_axis(plane, leaf), extent)
        # A plane that keeps its extent would be handed through, and shared.
        resized.append(jnp.copy(leaf))
    return resized


def _with_rows(leaf: jax.Array, axis: int, extent: int) -> jax.Array:
    if extent <= leaf.shape[axis]:
        return jax.lax.slice_in_dim(leaf, 0, extent, axis=axis)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        # A PRNG key has no zero; what stands in a row past the length does not matter.
        return jnp.take(leaf, jnp.minimum(jnp.arange(extent), leaf.shape[axis] - 1), axis=axis)
    widths = [(0, extent - leaf.shape[axis] if i == axis else 0, 0) for i in range(leaf.ndim)]
    return jax.lax.pad(leaf, jnp.zeros((), leaf.dtype), widths)


def consume(leaves: Sequence[jax.Array]) -> None:
    """Deletes what was given as `into=`: a view held elsewhere costs the donation, not the rule."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and not leaf.is_deleted():
            leaf.delete()


def compact(backend: Backend, state: PyTree, *, into: PyTree | None = None) -> PyTree:
    """Returns a copy whose append planes hold the bucket of the longest sequence. See `sc.capture`."""
    if is_traced(state):
        raise UnsupportedError("A compact capture reads the lengths, which is not possible inside a trace.")
    lengths = checks.host_ints(_lengths(backend, state), "position")
    checks.check_lengths(lengths)
    return resize(backend, state, bucket_extents(backend.layout, state, lengths), into=into)


def bucket_extents(layout: Layout, state: PyTree, lengths: np.ndarray) -> tuple[int | None, ...]:
    """Returns the rows of each append plane in the bucket of the longest length; None for other planes."""
    rows = bucket_rows(int(lengths.max(initial=0)))
    return tuple(
        min(rows, leaf.shape[row_axis(plane, leaf)]) if plane.kind == "append" else None
        for plane, leaf in zip(layout.planes, layout.leaves(state), strict=True)
    )


def grow(backend: Backend, state: PyTree, capacity: int, *, params: PyTree = None) -> PyTree:
    """Returns the same sequences in a state of another capacity, usually a larger one.

    Append planes gain or lose rows; every other plane is copied as it is. `sc.equal` holds
    between the two. Donates nothing.

    Args:
      backend: of the state.
      state: of `B` sequences.
      capacity: tokens `S` that the new state shall hold.
      params: of the backend. If given, the result is what `init` makes at that capacity,
        which matters where append planes have different numbers of rows, or where other
        planes depend on it.

    Raises:
      CapacityError: a sequence is longer than `capacity`, or it is no whole number of at least 1.
      UnsupportedError: the state has no append plane, so it has no capacity; or its append
        planes have different numbers of rows and `params` is missing; or it would lose
        rows inside a trace, where lengths cannot be checked.
      GeometryError: `params` shows that a state of that capacity has other planes.
    """
    layout = backend.layout
    if isinstance(capacity, bool) or not isinstance(capacity, Integral) or capacity < 1:
        raise CapacityError(f"A capacity is a whole number of at least 1, but is {capacity!r}.")
    leaves = layout.leaves(state)
    has = layout.capacity(leaves)
    if has is None:
        raise UnsupportedError(f"A state of {backend.name} has no append plane, so its capacity needs no growing.")
    if capacity < has:
        _check_fits(backend, state, int(capacity))
    if params is None:
        return resize(backend, state, _even_extents(backend, leaves, int(capacity)))
    made = backend.geometry(params, batch=layout.lengths(state).shape[0], capacity=int(capacity))
    extents = row_extents(made)
    check_alike(made.struct(), resize_struct(layout, state, extents), f"a state grown to a capacity of {capacity}")
    return resize(backend, state, extents)


def _even_extents(backend: Backend, leaves: list[jax.Array], capacity: int) -> tuple[int | None, ...]:
    """Returns `capacity` rows for each append plane, if all have equally many now."""
    layout = backend.layout
    rows = {layout.paths[i]: leaves[i].shape[row_axis(layout.planes[i], leaves[i])] for i in layout.indices("append")}
    if len(set(rows.values())) > 1:
        found = ", ".join(f"`{path}` {count}" for path, count in rows.items())
        raise UnsupportedError(
            f"The append planes of {backend.name} have different numbers of rows ({found}), so the capacity alone does "
            "not say how many each shall have. Give `params=`, to ask the backend's `init`."
        )
    return tuple(capacity if plane.kind == "append" else None for plane in layout.planes)


def _check_fits(backend: Backend, state: PyTree, capacity: int) -> None:
    if is_traced(state):
        raise UnsupportedError("Inside a trace the lengths cannot be checked, so a state can only gain capacity there.")
    lengths = np.array(_lengths(backend, state))
    longest = int(np.where(lengths < 0, ~lengths, lengths).max(initial=0))
    if longest > capacity:
        raise CapacityError(
            f"A sequence holds {longest} tokens, so its append planes cannot be cut to {capacity} rows. Ask for at "
            f"least {longest}."
        )


def _lengths(backend: Backend, state: PyTree) -> Sequence[int] | jax.Array:
    check_alive(backend.layout.named(state))
    return backend.layout.lengths(state)

"""What can be read of a state, and bitwise equality over it."""

import jax
import jax.numpy as jnp

from statecore.state._layout import Layout, along, per_row, row_axis
from statecore.state.planes import Plane


def readable(layout: Layout, leaves: list[jax.Array], capacity: int | None = None) -> list[jax.Array]:
    """Returns, plane by plane, what can be read, with zeros for what cannot.

    Rows of an `append` plane count below the position, rows of a `sliding` plane over
    the last `W - 1` positions, newest first, whatever the ring's size; all else counts whole.

    Args:
      layout: of the state.
      leaves: of the state.
      capacity: rows of the append planes to look at; all if None.
    """
    lengths = leaves[layout.position]
    # A refused state keeps its length as ~p.
    lengths = jnp.where(lengths < 0, ~lengths, lengths)
    return [_readable(plane, leaf, lengths, capacity) for plane, leaf in zip(layout.planes, leaves, strict=True)]


def _readable(plane: Plane, leaf: jax.Array, lengths: jax.Array, capacity: int | None) -> jax.Array:
    if plane.kind not in ("append", "sliding"):
        return leaf
    axis, length = row_axis(plane, leaf), per_row(plane, leaf, lengths)
    if plane.kind == "append":
        rows = leaf.shape[axis] if capacity is None else capacity
        leaf = jax.lax.slice_in_dim(leaf, 0, rows, axis=axis)
        readable = along(jnp.arange(rows), axis, leaf.ndim) < length
    else:
        back = along(jnp.arange(1, plane.size or 1), axis, leaf.ndim)
        readable = back <= length
        leaf = jnp.take_along_axis(leaf, (length - back) % leaf.shape[axis], axis=axis)
    return jnp.where(readable, leaf, jnp.zeros((), leaf.dtype))


def plane_differs(layout: Layout, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    """Returns, plane by plane, whether anything that can be read differs in its bits.

    Capacities may differ; each length fits the smaller one, or the lengths differ.
    """
    capacities = [size for size in (layout.capacity(a), layout.capacity(b)) if size is not None]
    capacity = min(capacities, default=None)
    pairs = zip(readable(layout, a, capacity), readable(layout, b, capacity), strict=True)
    return [jnp.any(bits(left) != bits(right)) for left, right in pairs]


def bits(leaf: jax.Array) -> jax.Array:
    """Returns the bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([bits(leaf.real), bits(leaf.imag)])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(leaf, f"uint{jnp.finfo(leaf.dtype).bits}")
    return leaf

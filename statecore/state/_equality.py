"""Bitwise equality of two states over what can be read of them."""

import jax
import jax.numpy as jnp

from statecore.state._layout import Layout, per_row
from statecore.state.planes import Plane


def plane_differs(layout: Layout, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    """Returns, plane by plane, whether anything that can be read differs in its bits.

    Rows of an `append` plane count below the position, rows of a `sliding` plane over
    the last `W - 1` positions, whatever the two rings' sizes; all else counts whole.
    """
    lengths = a[layout.position]
    # A refused state keeps its length as ~p.
    lengths = jnp.where(lengths < 0, ~lengths, lengths)
    return [_differs(plane, left, right, lengths) for plane, left, right in zip(layout.planes, a, b, strict=True)]


def _differs(plane: Plane, a: jax.Array, b: jax.Array, lengths: jax.Array) -> jax.Array:
    if plane.kind == "append":
        rows = min(a.shape[plane.axis], b.shape[plane.axis])
        a, b = (jax.lax.slice_in_dim(x, 0, rows, axis=plane.axis % x.ndim) for x in (a, b))
        positions = _along_rows(plane, a, jnp.arange(rows))
        readable = positions < per_row(plane, a, lengths)
    elif plane.kind == "sliding":
        back = jnp.arange(1, plane.size)
        a, b, readable = *(_last_rows(plane, x, lengths, back) for x in (a, b)), None
        readable = _along_rows(plane, a, back) <= per_row(plane, a, lengths)
    else:
        readable = jnp.ones((), bool)
    differs = _bits(a) != _bits(b)
    extra = differs.ndim - readable.ndim  # a key's bits have an axis more than the key
    return jnp.any(differs & readable.reshape(*readable.shape, *[1] * extra))


def _along_rows(plane: Plane, leaf: jax.Array, values: jax.Array) -> jax.Array:
    axis = plane.axis % leaf.ndim
    return values.reshape([-1 if i == axis else 1 for i in range(leaf.ndim)])


def _last_rows(plane: Plane, leaf: jax.Array, lengths: jax.Array, back: jax.Array) -> jax.Array:
    """Returns the ring's rows of positions `lengths - back`, along the plane's axis."""
    size = leaf.shape[plane.axis]
    index = (per_row(plane, leaf, lengths) - _along_rows(plane, leaf, back)) % size
    return jnp.take_along_axis(leaf, index, axis=plane.axis)


def _bits(leaf: jax.Array) -> jax.Array:
    """Returns the bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_bits(leaf.real), _bits(leaf.imag)], axis=-1)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(leaf, f"uint{jnp.finfo(leaf.dtype).bits}")
    return leaf

"""Sequences of a state as rows: take some, put some."""

import jax
import jax.numpy as jnp

from statecore.state._layout import Layout


def take(layout: Layout, leaves: list[jax.Array], rows: jax.Array) -> list[jax.Array]:
    """Returns rows `rows` `[N]` of every plane; the caller has checked the range."""
    return [
        leaf if plane.batch_axis is None else jnp.take(leaf, rows, axis=plane.batch_axis, mode="clip")
        for plane, leaf in zip(layout.planes, leaves, strict=True)
    ]


def put(layout: Layout, leaves: list[jax.Array], rows: jax.Array, other: list[jax.Array]) -> list[jax.Array]:
    """Returns the planes with `other`'s rows at `rows` `[N]`; a row past the end is dropped."""
    placed = []
    for plane, leaf, new in zip(layout.planes, leaves, other, strict=True):
        if plane.batch_axis is None:
            placed.append(leaf)
            continue
        axis = plane.batch_axis % leaf.ndim
        where = (slice(None),) * axis + (rows,)
        placed.append(leaf.at[where].set(new, mode="drop"))
    return placed

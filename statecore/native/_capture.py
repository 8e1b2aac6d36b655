"""Capture and copy: an independent state in buffers of its own."""

import functools

import jax
import jax.numpy as jnp

from statecore._pytree import check_alike, check_alive, check_unaliased, copy_leaves, is_traced, named_leaves
from statecore._typing import PyTree


def capture(state: PyTree, *, into: PyTree | None = None) -> PyTree:
    """Returns an independent copy of `state`. Donates `into`, never `state`.

    Whatever happens to `state` later, donation included, the copy keeps its bits.

    Args:
      state: any pytree of arrays.
      into: a state of the same geometry whose buffers take the copy, so that nothing is
        allocated; it is consumed, and whatever it held does not matter.

    Raises:
      StateConsumedError: `state` or `into` was donated before.
      GeometryError: `into` has another structure, shape or dtype.
      AliasError: `into` shares a buffer with `state` or with itself.
    """
    if is_traced(state, into):
        return jax.tree.map(jnp.copy, state)
    source = named_leaves(state)
    check_alive(source)
    if into is None:
        return copy_leaves(state)
    target = named_leaves(into)
    check_alive(target, "destination")
    check_alike(state, into, "`into`")
    check_unaliased(source + [(f"into.{path}", leaf) for path, leaf in target])
    copied = _copy_into(state, into)
    for _, leaf in target:
        # A view of it held elsewhere costs the donation, not the rule that it is consumed.
        if not is_traced(copied) and not leaf.is_deleted():
            leaf.delete()
    return copied


def copy(saved: PyTree, *, into: PyTree | None = None) -> PyTree:
    """Returns another independent copy of a saved state. Donates `into`, never `saved`.

    The same as `capture`; it is named for what it is applied to.
    """
    return capture(saved, into=into)


@functools.partial(jax.jit, donate_argnums=(1,), keep_unused=True)
def _copy_into(state: PyTree, into: PyTree) -> PyTree:
    del into  # its buffers take the result
    return jax.tree.map(jnp.copy, state)

"""Capture and copy: an independent state in buffers of its own."""

import functools

import jax
import jax.numpy as jnp

from statecore._errors import UnsupportedError
from statecore._pytree import (
    check_alike,
    check_alive,
    check_kept,
    check_unaliased,
    copy_leaves,
    is_traced,
    named_leaves,
)
from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.native._compact import compact, consume


def capture(
    state: PyTree, *, into: PyTree | None = None, mode: str = "fresh", backend: Backend | None = None
) -> PyTree:
    """Returns an independent copy of `state`. Donates `into`, never `state`.

    Whatever happens to `state` later, donation included, the copy keeps its bits.

    Args:
      state: any pytree of arrays.
      into: a state of the same geometry whose buffers take the copy, so that nothing is
        allocated; it is consumed, and whatever it held does not matter.
      mode: `fresh` copies all planes whole. `compact` cuts append planes to the bucket of
        the longest sequence, a power of two from 16 up, so that its cost follows the
        length; `grow` brings it back to a capacity. `lazy` needs a runtime.
      backend: of the state; needed for `compact`, to know the append planes.

    Raises:
      StateConsumedError: `state` or `into` was donated before.
      GeometryError: `into` has another structure, shape or dtype than the copy; or a plane
        is an array of NumPy that JAX has no dtype for.
      AliasError: `into` shares a buffer with `state` or with itself.
      UnsupportedError: the mode is unknown, or not possible here.
    """
    if mode == "lazy":
        raise UnsupportedError(
            "A lazy capture shares buffers until the owner of the state moves on, and a plain value has no owner that "
            "would know. Use `Runtime.capture(mode='lazy')`, or capture `fresh`."
        )
    if mode == "compact":
        if backend is None:
            raise UnsupportedError("A compact capture cuts append planes, so it needs `backend=`, which knows them.")
        return compact(backend, state, into=into)
    if mode != "fresh":
        raise UnsupportedError(f"mode={mode!r} is not one of fresh, lazy, compact.")
    if is_traced(state, into):
        return jax.tree.map(jnp.copy, state)
    source = named_leaves(state)
    check_alive(source)
    check_kept(source)
    if into is None:
        return copy_leaves(state)
    target = named_leaves(into)
    check_alive(target, "destination")
    check_alike(state, into, "`into`")
    check_unaliased(source + [(f"into.{path}", leaf) for path, leaf in target])
    copied = _copy_into(state, into)
    consume([leaf for _, leaf in target])
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

"""Exchange: two states change places, and no tensor moves."""

import jax

from statecore._errors import GeometryError, UnsupportedError
from statecore._pytree import check_alive, is_traced, named_leaves
from statecore._typing import PyTree


def exchange(state: PyTree, saved: PyTree) -> tuple[PyTree, PyTree]:
    """Returns `(saved, state)`: the same buffers, in constant time. Donates nothing. Host only.

    Args:
      state: the state in use.
      saved: a state of the same geometry.

    Raises:
      UnsupportedError: called inside a trace, where an exchange would copy both.
      StateConsumedError: one of them was donated.
      GeometryError: they differ in structure, shape or dtype.
    """
    if is_traced(state, saved):
        raise UnsupportedError(
            "`exchange` moves references on the host; inside a trace it would copy both states. "
            "Exchange outside, or choose between two states with `jax.lax.select`."
        )
    ours, theirs = named_leaves(state), named_leaves(saved)
    check_alive(ours)
    check_alive(theirs, "saved state")
    if jax.tree.structure(state) != jax.tree.structure(saved):
        raise GeometryError(
            f"The saved state has the structure {jax.tree.structure(saved)}, but the state in use has "
            f"{jax.tree.structure(state)}. Is it a state of another backend?"
        )
    for (path, leaf), (_, other) in zip(ours, theirs, strict=True):
        if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            raise GeometryError(
                f"Plane `{path}` of the saved state is {other.dtype}{list(other.shape)}, but the state in use has "
                f"{leaf.dtype}{list(leaf.shape)}. Was it made for another batch or capacity?"
            )
    return saved, state

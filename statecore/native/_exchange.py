"""Exchange: two states change places, and no tensor moves."""

from statecore._errors import UnsupportedError
from statecore._pytree import check_alike, check_alive, is_traced, named_leaves
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
    check_alive(named_leaves(state))
    check_alive(named_leaves(saved), "saved state")
    check_alike(state, saved, "the saved state")
    return saved, state

"""Some planes of one sequence: taken out of a state, put into a row of one."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from statecore._errors import GeometryError, UnsupportedError
from statecore._pytree import check_alive, check_unaliased, copy_leaves, is_traced
from statecore._typing import PyTree
from statecore.backend import Backend, checks
from statecore.state import Layout, put


def part(layout: Layout, indices: Sequence[int]) -> Layout:
    """Returns the layout of some planes, whose state is the list of their leaves."""
    return Layout(
        jax.tree.structure([0] * len(indices)),
        tuple(layout.paths[i] for i in indices),
        tuple(layout.planes[i] for i in indices),
    )


def check_state(layout: Layout, state: PyTree, row: int) -> np.ndarray:
    """Returns the lengths `[B]` of a state that a sequence is read from or written to.

    Raises:
      UnsupportedError: called inside a trace, where slots cannot be counted.
      GeometryError: the state is built otherwise, or has no sequence `row`.
      StateConsumedError, RefusedError: the state cannot be used.
    """
    if is_traced(state, row):
        raise UnsupportedError("A store counts its slots on the host; save and restore outside of `jit`.")
    checks.whole(row, "row", least=-(2**31))
    check_alive(layout.named(state))
    lengths = checks.host_ints(layout.lengths(state), "position")
    checks.check_lengths(lengths)
    if not 0 <= row < len(lengths):
        raise GeometryError(
            f"Row {row} does not exist: the state has {len(lengths)} sequences, 0 to {len(lengths) - 1}."
        )
    return lengths


def write_row(backend: Backend, state: PyTree, row: int, new: Mapping[int, jax.Array], *, donate: bool) -> PyTree:
    """Returns `state` with the planes `new` of one sequence in row `row`. Donates `state` if `donate`.

    Args:
      backend: of the state.
      state: of `B` sequences; checked by the caller.
      row: which sequence is overwritten.
      new: by the index of the plane, its value for one sequence, the batch axis being 1.
      donate: whether `state` may be consumed.

    Raises:
      AliasError: two planes of a state to be donated share a buffer.
    """
    layout, leaves = backend.layout, backend.layout.leaves(state)
    indices = tuple(sorted(new))
    chosen = part(layout, indices)
    if donate:
        check_unaliased(layout.named(state))

    def body(written, rows, new):
        return put(chosen, written, rows, new)

    run = backend.compile(
        ("write_row", donate, indices), lambda: jax.jit(body, donate_argnums=(0,) if donate else (), keep_unused=True)
    )
    written = [leaves[i] for i in indices]
    placed = dict(zip(indices, run(written, np.array([row], np.int32), [new[i] for i in indices]), strict=True))
    if donate:
        consume(written)
    else:
        others = [i for i in range(len(leaves)) if i not in placed]
        placed |= dict(zip(others, copy_leaves([leaves[i] for i in others]), strict=True))
    return layout.unflatten([placed.get(i, leaf) for i, leaf in enumerate(leaves)])


def consume(leaves: Sequence[jax.Array]) -> None:
    """Deletes what was donated but not taken: a live NumPy view makes XLA copy silently."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()

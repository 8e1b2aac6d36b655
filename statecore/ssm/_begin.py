"""The beginning of a `SequenceState`: what a state must be before it is kept with its tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError
from statecore._pytree import check_alive, check_kept
from statecore._typing import IntLike, PyTree
from statecore.backend import Backend, checks
from statecore.ssm._doors import check_host
from statecore.ssm._ring import Ring
from statecore.ssm._sequence import SequenceState
from statecore.ssm._strategy import choose_strategy
from statecore.state import Geometry, is_marked, state_geometry, validate


def begin(
    backend: Backend,
    state: PyTree,
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    ring_slots: int = 0,
    strategy: str = "auto",
    finite_every: int | None = None,
    highest: IntLike | None = None,
    geometry: Geometry | None = None,
    vocab_size: int | None = None,
) -> SequenceState:
    """Returns a sequence over `state`, which is not copied, unless it is NumPy's.

    Args:
      backend: of the state.
      state: of `B` sequences.
      tokens: what the state was fed, a list a sequence; needed if it was fed anything. A
        state that was just patched is seen and begins a patched sequence.
      ring_slots: slots of the decode-rollback ring.
      strategy: how windows are undone: `replay` (the backend's own verify and replay),
        `select` (every step kept), `rerun` (nothing kept, the model run again), or `auto`.
      finite_every: check that recurrent planes are finite after each chunk and every so
        many tokens, which waits for the device; None checks only in `check_finite`.
      highest: the highest row that was ever written to the rings, plus one, an int or `[B]`:
        `seq.highest` of the sequence that the state comes from. None assumes the worst, so
        that a state with rings cannot go back below the length it has here.
      geometry: what the state must be, from the backend; None checks the state against itself alone.
      vocab_size: what all tokens must be below; None does not look.

    Raises:
      UnsupportedError: the backend cannot follow the strategy, or this is inside a trace.
      GeometryError: the tokens are not as many as the state holds, or the state's planes do
        not fit each other or `geometry`.
      CapacityError: the position says more tokens than the append planes have rows.
      StateConsumedError, RefusedError: the state cannot be used.
    """
    lengths = _checked_state(backend, state, geometry)
    if tokens is not None and (isinstance(tokens, str) or not isinstance(tokens, Sequence | np.ndarray)):
        raise GeometryError(f"`tokens` must hold a list of token ids for each sequence, but is {tokens!r}.")
    state = jax.tree.map(frozen, state)
    rows = [_history(row, vocab_size) for row in ([[]] * len(lengths) if tokens is None else tokens)]
    checks.whole(ring_slots, "ring_slots")
    if finite_every is not None:
        checks.whole(finite_every, "finite_every", least=1)
    if [len(row) for row in rows] != lengths.tolist():
        raise GeometryError(
            f"The state holds {lengths.tolist()} tokens, but {[len(row) for row in rows]} were given. A sequence must "
            "know what its state was fed: pass `tokens=`, a list for each sequence."
        )
    return SequenceState(
        backend=backend,
        state=state,
        tokens=tuple(rows),
        strategy=choose_strategy(backend, strategy),
        highest=_highest(backend, state, lengths, highest),
        ring=Ring(ring_slots),
        finite_every=finite_every,
        patched=frozenset(i for i, leaf in enumerate(backend.layout.leaves(state)) if is_marked(leaf)),
        unchecked=int(lengths.max(initial=0)),
    )


def _checked_state(backend: Backend, state: PyTree, geometry: Geometry | None) -> np.ndarray:
    """Returns the lengths `[B]` of a state whose planes fit each other."""
    if not isinstance(backend, Backend):
        raise GeometryError(f"`begin` takes a backend and its state, but was given {type(backend).__name__}.")
    check_host(state)
    layout = backend.layout
    for path, leaf in layout.named(state):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise GeometryError(f"Plane `{path}` must be an array, but is {leaf!r}.")
    check_kept(layout.named(state))
    check_alive(layout.named(state))
    state_geometry(layout, state, backend.name)
    if geometry is not None:
        validate(geometry, state)
    lengths = checks.host_ints(layout.lengths(state), "position")
    checks.check_lengths(lengths)
    checks.check_room(layout, lengths, np.zeros_like(lengths), layout.capacity(layout.leaves(state)))
    return lengths


def _highest(backend: Backend, state: PyTree, lengths: np.ndarray, given: IntLike | None) -> np.ndarray:
    """Returns the highest row ever written plus one, `[B]`; the highest there can be if it is not given."""
    limit = backend.layout.undo_limit(backend.layout.leaves(state))
    most = lengths if limit is None else lengths + limit[0]
    if given is None:
        return np.where(lengths > 0, most, 0)  # an empty sequence has no row to lose
    array = checks.host_ints(given, "highest")
    array = np.full(lengths.shape, array) if array.ndim == 0 else array
    if array.shape != lengths.shape or (array < lengths).any() or (limit is not None and (array > most).any()):
        raise GeometryError(
            f"highest is {array.tolist()}, but must lie between the lengths {lengths.tolist()} and {most.tolist()}, "
            "beyond which a ring would not hold what the state says it does. Was it counted for another sequence?"
        )
    return array


def _history(row: IntLike, vocab_size: int | None) -> np.ndarray:
    array = checks.host_ints(row, "tokens")
    if array.ndim != 1 or (array.size and not 0 <= array.min() <= array.max() < 2**31):
        raise GeometryError(f"`tokens` must hold a list of token ids for each sequence, but one is {row!r}.")
    return array.astype(np.int32) if vocab_size is None else checks.check_vocab(array, None, vocab_size)


def frozen(leaf: Any) -> Any:
    """Returns a leaf that no caller can change behind a checkpoint's back, as an array of NumPy can be."""
    return jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf

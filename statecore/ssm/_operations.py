"""The operations on a `SequenceState`: checkpoint, verify, rollback, commit, and plain steps."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from statecore._errors import GeometryError, IdentityError, LifecycleError, RollbackError, UnsupportedError
from statecore._pytree import check_alive, is_traced
from statecore._typing import IntLike, PyTree
from statecore.backend import Backend, checks, launch
from statecore.backend import commit as commit_window
from statecore.backend import extend as extend_state
from statecore.backend import verify as verify_state
from statecore.ssm._finite import check_finite
from statecore.ssm._ring import Ring
from statecore.ssm._sequence import Checkpoint, OpenWindow, SequenceState, Ticket
from statecore.ssm._strategy import choose_strategy

# What a checkpoint refers to. Attention rows go back by their length.
_KEPT = ("position", "shift", "recurrent")


def begin(
    backend: Backend,
    state: PyTree,
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    ring_slots: int = 0,
    strategy: str = "auto",
    finite_every: int | None = None,
) -> SequenceState:
    """Returns a sequence over `state`, which is not copied.

    Args:
      backend: of the state.
      state: of `B` sequences.
      tokens: what the state was fed, a list a sequence; needed if it was fed anything.
      ring_slots: slots of the decode-rollback ring.
      strategy: how windows are undone: `replay` (the backend's own verify and replay),
        `select` (every step kept), `rerun` (nothing kept, the model run again), or `auto`.
      finite_every: check that recurrent planes are finite after each chunk and every so
        many steps, which waits for the device; None checks only in `check_finite`.

    Raises:
      UnsupportedError: the backend cannot follow the strategy.
      GeometryError: the tokens are not as many as the state holds.
    """
    check_alive(backend.layout.named(state))
    lengths = checks.host_ints(backend.layout.lengths(state), "position")
    checks.check_lengths(lengths)
    rows = [_history(row) for row in ([[]] * len(lengths) if tokens is None else tokens)]
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
        highest=lengths,
        ring=Ring(ring_slots),
        finite_every=finite_every,
    )


def _history(row: IntLike) -> np.ndarray:
    array = checks.host_ints(row, "tokens")
    if array.ndim != 1 or (array.size and not 0 <= array.min() <= array.max() < 2**31):
        raise GeometryError(f"`tokens` must hold a list of token ids for each sequence, but one is {row!r}.")
    return array.astype(np.int32)


def has_ssm_layers(seq: SequenceState) -> bool:
    """Returns whether lowering the length is not enough to go back: any shift or recurrent plane."""
    return bool(seq.backend.layout.indices("shift", "recurrent"))


def rollback_unsupported(seq: SequenceState) -> tuple[str, ...]:
    """Returns the paths of planes that nothing undoes; empty if every rollback is possible."""
    return tuple(seq.backend.layout.paths[i] for i in seq.backend.layout.indices("opaque"))


def step(
    params: PyTree, seq: SequenceState, tokens: IntLike, *, donate: bool = False
) -> tuple[SequenceState, jax.Array]:
    """Takes one token of each sequence, `[B]`; returns logits `[B, V]`. Donates `seq.state` if `donate`.

    What a checkpoint refers to is never donated.

    Raises:
      LifecycleError: a window is open.
      NonFiniteError: a recurrent plane is not finite, if that is checked here.
      GeometryError, CapacityError, StateConsumedError: as `statecore.step`.
    """
    _check_closed(seq, tokens)
    array = checks.check_tokens(tokens, len(seq.tokens), 1)
    array = checks.check_vocab(array, None, seq.backend.vocab_size(params, seq.state))
    _check_room(seq, np.ones_like(seq.lengths))
    check_alive(seq.backend.layout.named(seq.state), "sequence")
    state, logits = launch.step(seq.backend, params, seq.state, array, donate=donate, shared=_shared(seq))
    advanced = _advanced(seq, state, array[:, None], np.ones_like(seq.lengths))
    if seq.finite_every and (advanced.lengths % seq.finite_every == 0).any():
        check_finite(advanced)
    return advanced, logits


def extend(
    params: PyTree,
    seq: SequenceState,
    tokens: IntLike,
    *,
    num_valid: IntLike | None = None,
    logits: str = "all",
) -> tuple[SequenceState, jax.Array | None]:
    """Takes a chunk, `[B, T]`; returns logits as `statecore.extend` does.

    Raises:
      LifecycleError: a window is open.
      NonFiniteError: a recurrent plane is not finite, if that is checked here.
      GeometryError, CapacityError, StateConsumedError: as `statecore.extend`.
    """
    _check_closed(seq, tokens, num_valid)
    state, found = extend_state(seq.backend, params, seq.state, tokens, num_valid=num_valid, logits=logits)
    array = np.array(tokens)
    counts = checks.check_rows_counts(num_valid, len(seq.tokens), array.shape[1], "num_valid")
    advanced = _advanced(seq, state, array, counts)
    return (check_finite(advanced) if seq.finite_every else advanced), found


def checkpoint(seq: SequenceState) -> SequenceState:
    """Returns the sequence with a checkpoint at this point, in place of an earlier one.

    It refers to the position, shift and recurrent planes and copies nothing; attention
    rows go back by their length.

    Raises:
      LifecycleError: a window is open.
    """
    _check_closed(seq)
    check_alive(seq.backend.layout.named(seq.state), "sequence")
    leaves = seq.backend.layout.leaves(seq.state)
    planes = {i: leaves[i] for i in seq.backend.layout.indices(*_KEPT)}
    return dataclasses.replace(seq, checkpoint=Checkpoint(planes=planes, lengths=seq.lengths))


def verify(
    params: PyTree, seq: SequenceState, tokens: IntLike, *, num_valid: IntLike | None = None
) -> tuple[SequenceState, jax.Array]:
    """Reads a window, `[B, K]`, and opens it; returns logits `[B, K, V]`.

    The live state is untouched but for attention rows past its length. Until the window
    is resolved by `rollback` or `commit_accepted_prefix`, everything else is refused.

    Raises:
      LifecycleError: a window is open already.
      RollbackError: a ring could not undo a window this wide.
      GeometryError, CapacityError, StateConsumedError: as `statecore.verify`.
    """
    _check_closed(seq, tokens, num_valid)
    mode = "fast" if seq.strategy == "replay" else "exact"
    window = verify_state(seq.backend, params, seq.state, tokens, num_valid=num_valid, mode=mode)
    array = np.array(tokens)
    counts = checks.host_ints(window.num_valid, "num_valid")
    kept = params if seq.strategy == "rerun" else None
    if seq.strategy == "rerun":
        window = dataclasses.replace(window, trace=None)  # nothing is kept but the tokens
    opened = OpenWindow(window=window, tokens=array, num_valid=counts, params=kept, ticket=Ticket())
    highest = np.maximum(seq.highest, seq.lengths + counts)
    return dataclasses.replace(seq, state=window.state, opened=opened, highest=highest), window.logits


def rollback(seq: SequenceState, num_accepted: IntLike) -> SequenceState:
    """Goes back to `num_accepted` rows after the checkpoint: an int, or `[B]`.

    With an open window, the rows are the window's, and it is resolved; 0 rows are the
    checkpoint. Without one, only 0 is possible. The checkpoint stays usable.

    Raises:
      RollbackError: there is no checkpoint, the count is out of range, an opaque plane
        would have to go back, or a ring no longer holds the rows.
      LifecycleError: rows are asked for and no window is open, or it was resolved before.
    """
    if seq.checkpoint is None:
        raise RollbackError("There is no checkpoint to roll back to: `checkpoint` the sequence before the verify.")
    if seq.opened is None:
        checks.check_accepted(num_accepted, np.zeros_like(seq.lengths))
        return _to_checkpoint(seq)
    counts = _checked_counts(seq, num_accepted)
    if (seq.checkpoint.lengths != seq.lengths).any():
        if counts.any():
            raise RollbackError(
                f"The checkpoint holds {seq.checkpoint.lengths.tolist()} tokens, but the window began at "
                f"{seq.lengths.tolist()}: rows after the checkpoint are not rows of this window. Checkpoint right "
                "before the verify, or resolve the window with `commit_accepted_prefix`."
            )
        gone = _to_checkpoint(dataclasses.replace(seq, opened=None))
        _serve(seq.opened)
        return gone
    return _resolved(seq, counts)


def commit_accepted_prefix(seq: SequenceState, num_accepted: IntLike, k: int, *, donate: bool = False) -> SequenceState:
    """Makes the accepted rows of the open window the state. Donates its recurrent planes if `donate`.

    Args:
      seq: with an open window.
      num_accepted: rows kept, the anchor included, from 1 to `k`: an int, or `[B]`; 0 only
        for a sequence without valid rows.
      k: the window's width, drafts and anchor.
      donate: whether the state may be consumed; what a checkpoint refers to never is.

    Returns:
      the sequence after the kept rows. Its checkpoint is as it was.

    Raises:
      LifecycleError: no window is open, or it was resolved before.
      RollbackError: `k` is not the width, or a count is 0 or out of range.
    """
    window = _open(seq)
    width = window.tokens.shape[1]
    if k != width:
        hint = " It is the number of drafts; the anchor counts too." if k == width - 1 else ""
        raise RollbackError(f"k is {k}, but the open window is {width} rows wide.{hint}")
    array = checks.host_ints(num_accepted, "num_accepted")
    if (array > k).any():
        raise RollbackError(
            f"num_accepted is {array.tolist()}, more than the {k} rows of the window. Was the bonus token counted? "
            "It is not in the window."
        )
    counts = _checked_counts(seq, num_accepted)
    if ((counts == 0) & (window.num_valid > 0)).any():
        raise RollbackError(
            f"num_accepted is {counts.tolist()}: row 0 is the anchor, which was emitted before the verify, so at least "
            "one row is accepted. To keep none, `rollback` to 0."
        )
    return _resolved(seq, counts, donate=donate)


def _resolved(seq: SequenceState, counts: np.ndarray, *, donate: bool = False) -> SequenceState:
    """Returns the sequence with `counts` rows of its window committed and the window served."""
    opened = _open(seq)
    checks.check_opaque(seq.backend.layout, counts, opened.num_valid)
    if seq.strategy == "rerun":
        rerun_counts = counts.astype(np.int32)
        state, _ = launch.extend(
            seq.backend, opened.params, seq.state, _unpadded(opened), rerun_counts, logits="none", donate=False
        )
    elif donate:
        window, shared = opened.window, _shared(seq)
        state = launch.commit(
            seq.backend,
            window.state,
            window.trace,
            counts.astype(np.int32),
            mode=window.mode,
            donate=True,
            shared=shared,
        )
    else:
        state = commit_window(seq.backend, opened.window, counts)
    _serve(opened)
    return _advanced(dataclasses.replace(seq, opened=None), state, opened.tokens, counts)


def _unpadded(opened: OpenWindow) -> np.ndarray:
    valid = np.arange(opened.tokens.shape[1]) < opened.num_valid[:, None]
    return np.where(valid, opened.tokens, 0).astype(np.int32)


def _to_checkpoint(seq: SequenceState) -> SequenceState:
    """Returns the sequence at its checkpoint: planes by reference, attention rows by length."""
    saved = seq.checkpoint
    assert saved is not None
    _check_opaque_moved(seq, saved.lengths)
    _check_rings(seq, saved.lengths)
    layout = seq.backend.layout
    leaves = layout.leaves(seq.state)
    for i, plane in saved.planes.items():
        leaves[i] = plane
    check_alive(zip(layout.paths, leaves, strict=True), "checkpoint")
    return went_back(seq, layout.unflatten(leaves), saved.lengths)


def went_back(seq: SequenceState, state: PyTree, lengths: np.ndarray) -> SequenceState:
    """Returns the sequence at `lengths` `[B]` of its own tokens, with the planes of `state`."""
    tokens = tuple(row[:length] for row, length in zip(seq.tokens, lengths, strict=True))
    # What was kept of tokens that are now gone belongs to another history.
    ring = seq.ring.truncated(int(lengths.min()))
    saved = {entry.slot: seq.saved[entry.slot] for entry in ring.entries}
    kept = seq.checkpoint
    if kept is not None and (kept.lengths > lengths).any():
        kept = None
    return dataclasses.replace(
        seq, state=state, tokens=tokens, ring=ring, saved=saved, checkpoint=kept, marked=(), pending=()
    )


def check_can_go_back(seq: SequenceState, lengths: np.ndarray) -> None:
    """Raises RollbackError unless every plane can go back to `lengths` `[B]`."""
    _check_opaque_moved(seq, lengths)
    _check_rings(seq, lengths)


def _check_opaque_moved(seq: SequenceState, lengths: np.ndarray) -> None:
    if rollback_unsupported(seq) and (lengths != seq.lengths).any():
        _raise_opaque(seq)


def _raise_opaque(seq: SequenceState) -> None:
    paths = ", ".join(f"`{path}`" for path in rollback_unsupported(seq))
    raise RollbackError(f"Nothing undoes the opaque plane {paths}, so this sequence cannot go back.")


def _check_rings(seq: SequenceState, lengths: np.ndarray) -> None:
    """A ring can go back only as far as no row it needs was overwritten, by drafts included."""
    limit = seq.backend.layout.undo_limit(seq.backend.layout.leaves(seq.state))
    if limit is None:
        return
    back = seq.highest - lengths
    if (back > limit[0]).any():
        raise RollbackError(
            f"The ring `{limit[1]}` can go back {limit[0]} tokens from the highest row ever written, but "
            f"{back.max()} are asked for (to {lengths.tolist()}, from {seq.highest.tolist()}): the rows are gone."
        )


def _check_closed(seq: SequenceState, *args: object) -> None:
    if is_traced(seq.state, args):
        raise UnsupportedError(
            "A sequence keeps its tokens on the host, so its operations cannot run inside a trace. Use `sc.step`, "
            "`sc.verify` and `sc.commit` there."
        )
    if seq.opened is not None:
        raise LifecycleError(
            "A window is open: `rollback` or `commit_accepted_prefix` resolves it, and nothing else is possible before."
        )


def _open(seq: SequenceState) -> OpenWindow:
    if seq.opened is None:
        raise LifecycleError("No window is open: `verify` one first. A window serves once.")
    if seq.opened.ticket.is_served:
        raise LifecycleError(
            "This window was resolved already, through another copy of the sequence. A window serves once; go on with "
            "the sequence that resolving it returned."
        )
    if seq.opened.window.origin is not seq.backend.origin:
        raise IdentityError("The open window was verified by another backend than the sequence's.")
    return seq.opened


def _serve(opened: OpenWindow) -> None:
    opened.ticket.is_served = True


def _checked_counts(seq: SequenceState, num_accepted: IntLike) -> np.ndarray:
    opened = _open(seq)
    check_alive(seq.backend.layout.named(opened.window.state), "window")
    return checks.check_accepted(num_accepted, opened.num_valid)


def _check_room(seq: SequenceState, counts: np.ndarray) -> None:
    layout = seq.backend.layout
    checks.check_room(layout, seq.lengths, counts, layout.capacity(layout.leaves(seq.state)))


def _shared(seq: SequenceState) -> tuple[int, ...]:
    """Returns the indices of the live planes that the checkpoint or a ring slot refers to."""
    leaves = seq.backend.layout.leaves(seq.state)
    kept = [*seq.saved.values(), *([] if seq.checkpoint is None else [seq.checkpoint.planes])]
    return tuple(sorted({i for planes in kept for i, plane in planes.items() if leaves[i] is plane}))


def _advanced(seq: SequenceState, state: PyTree, tokens: np.ndarray, counts: np.ndarray) -> SequenceState:
    """Returns the sequence with `counts` `[B]` of `tokens` `[B, T]` appended."""
    pairs = zip(seq.tokens, tokens, counts, strict=True)
    appended = tuple(np.concatenate([row, new[:count].astype(np.int32)]) for row, new, count in pairs)
    highest = np.maximum(seq.highest, seq.lengths + counts)
    return dataclasses.replace(seq, state=state, tokens=appended, highest=highest, pending=())

"""The operations on a `SequenceState`: checkpoint, verify, rollback, commit, and plain steps."""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from statecore._errors import LifecycleError, RollbackError
from statecore._pytree import check_alive
from statecore._typing import IntLike, PyTree
from statecore.backend import checked_rows, checks, launch
from statecore.backend import verify as verify_state
from statecore.ssm._begin import frozen
from statecore.ssm._doors import check_closed, check_open, check_params, check_sequence, parts
from statecore.ssm._finite import check_planes
from statecore.ssm._sequence import Checkpoint, Edit, OpenWindow, SequenceState, Ticket
from statecore.state import mark

# What a checkpoint refers to. Attention rows go back by their length.
_KEPT = ("position", "shift", "recurrent")


def has_ssm_layers(seq: SequenceState) -> bool:
    """Returns whether lowering the length is not enough to go back: any shift or recurrent plane."""
    check_sequence(seq)
    return bool(seq.backend.layout.indices("shift", "recurrent"))


def rollback_unsupported(seq: SequenceState) -> tuple[str, ...]:
    """Returns the paths of planes that nothing undoes; empty if every rollback is possible."""
    check_sequence(seq)
    return tuple(seq.backend.layout.paths[i] for i in seq.backend.layout.indices("opaque"))


def step(
    params: PyTree, seq: SequenceState, tokens: IntLike, *, donate: bool = False
) -> tuple[SequenceState, jax.Array]:
    """Takes one token of each sequence, `[B]`; returns logits `[B, V]`. Donates `seq.state` if `donate`.

    What a checkpoint refers to is never donated, nor is anything where a finite check is
    due, so that the sequence is still there if it fails.

    Raises:
      LifecycleError: a window is open.
      NonFiniteError: a recurrent plane is not finite, if that is checked here.
      GeometryError, CapacityError, StateConsumedError: as `statecore.step`.
    """
    check_closed(seq, tokens)
    array = checks.check_tokens(tokens, len(seq.tokens), 1)
    array = checks.check_vocab(array, None, seq.backend.vocab_size(params, seq.state))
    _check_room(seq, np.ones_like(seq.lengths))
    counts = np.ones_like(seq.lengths)
    due = _is_due(seq, counts)
    donate = donate and not due
    state, logits = launch.step(seq.backend, params, seq.state, array, donate=donate, shared=_shared(seq, donate))
    return _advanced(seq, state, array[:, None], counts, due=due), logits


def extend(
    params: PyTree,
    seq: SequenceState,
    tokens: IntLike,
    *,
    num_valid: IntLike | None = None,
    logits: str = "all",
    donate: bool = False,
) -> tuple[SequenceState, jax.Array | None]:
    """Takes a chunk, `[B, T]`; returns logits as `statecore.extend` does. Donates `seq.state` if `donate`.

    What a checkpoint refers to is never donated, nor is anything if finite checks are on.

    Raises:
      LifecycleError: a window is open.
      NonFiniteError: a recurrent plane is not finite, if that is checked here.
      GeometryError, CapacityError, StateConsumedError: as `statecore.extend`.
    """
    check_closed(seq, tokens, num_valid)
    checks.check_logits(logits)
    array, counts = checked_rows(seq.backend, params, seq.state, tokens, num_valid)
    due = seq.finite_every is not None
    donate = donate and not due
    state, found = launch.extend(
        seq.backend, params, seq.state, array, counts, logits=logits, donate=donate, shared=_shared(seq, donate)
    )
    return _advanced(seq, state, array, counts, due=due), found


def checkpoint(seq: SequenceState) -> SequenceState:
    """Returns the sequence with a checkpoint at this point, in place of an earlier one.

    It refers to the position, shift and recurrent planes and copies nothing; attention
    rows go back by their length.

    Raises:
      LifecycleError: a window is open.
    """
    check_closed(seq)
    leaves = seq.backend.layout.leaves(seq.state)
    planes = {i: leaves[i] for i in seq.backend.layout.indices(*_KEPT)}
    return dataclasses.replace(
        seq, checkpoint=Checkpoint(planes=planes, lengths=seq.lengths, patched=seq.patched, edit=seq.edit)
    )


def verify(
    params: PyTree, seq: SequenceState, tokens: IntLike, *, num_valid: IntLike | None = None, donate: bool = False
) -> tuple[SequenceState, jax.Array]:
    """Reads a window, `[B, K]`, and opens it; returns logits `[B, K, V]`. Donates attention rows if `donate`.

    The live state is untouched but for attention rows past its length. Until the window
    is resolved by `rollback` or `commit_accepted_prefix`, everything else is refused. The
    strategy `rerun` keeps `params` until then: arrays of NumPy, which could change
    meanwhile, as copies.

    Raises:
      LifecycleError: a window is open already.
      RollbackError: a ring could not undo a window this wide.
      GeometryError, CapacityError, StateConsumedError: as `statecore.verify`.
    """
    check_closed(seq, tokens, num_valid)
    donate = donate and not seq.lent
    mode = "fast" if seq.strategy == "replay" else "exact"
    window = verify_state(seq.backend, params, seq.state, tokens, num_valid=num_valid, mode=mode, donate=donate)
    array = np.array(tokens)
    counts = checks.host_ints(window.num_valid, "num_valid")
    kept = jax.tree.map(frozen, params) if seq.strategy == "rerun" else None
    if seq.strategy == "rerun":
        window = dataclasses.replace(window, trace=None)  # nothing is kept but the tokens
    opened = OpenWindow(window=window, tokens=array, num_valid=counts, params=kept, ticket=Ticket())
    highest = np.maximum(seq.highest, seq.lengths + counts)
    # Reading the lengths has waited for what was started, and the rows are new arrays.
    verified = dataclasses.replace(seq, state=window.state, opened=opened, highest=highest, pending=(), lent=())
    opened.ticket.parts = parts(verified, opened)
    return with_mark(verified), window.logits


def rollback(seq: SequenceState, num_accepted: IntLike, *, donate: bool = False) -> SequenceState:
    """Goes back to `num_accepted` rows after the checkpoint: an int, or `[B]`. Donates the state if `donate`.

    With an open window, the rows are the window's, and it is resolved; 0 rows are the
    checkpoint. Without one, only 0 is possible. The checkpoint stays usable.

    Raises:
      RollbackError: there is no checkpoint, the count is out of range, an opaque plane
        would have to go back, or a ring no longer holds the rows.
      LifecycleError: rows are asked for and no window is open, or it was resolved before.
    """
    check_sequence(seq, num_accepted)
    if seq.checkpoint is None:
        raise RollbackError("There is no checkpoint to roll back to: `checkpoint` the sequence before the verify.")
    if seq.opened is None:
        _check_no_rows(seq, num_accepted)
        return _to_checkpoint(seq)
    counts = _checked_counts(seq, num_accepted)
    if (seq.checkpoint.lengths != seq.lengths).any() or seq.checkpoint.edit is not seq.edit:
        if counts.any():
            edited = ", in a state edited or restored since" if seq.checkpoint.edit is not seq.edit else ""
            raise RollbackError(
                f"The checkpoint holds {seq.checkpoint.lengths.tolist()} tokens, but the window began at "
                f"{seq.lengths.tolist()}{edited}: rows after the checkpoint are not rows of this window. Checkpoint "
                "right before the verify, or resolve the window with `commit_accepted_prefix`."
            )
        gone = _to_checkpoint(dataclasses.replace(seq, opened=None))
        _serve(seq.opened)
        return gone
    return _resolved(seq, counts, donate=donate)


def _check_no_rows(seq: SequenceState, num_accepted: IntLike) -> None:
    array = checks.host_ints(num_accepted, "num_accepted")
    if array.any():
        raise LifecycleError(
            f"num_accepted is {array.tolist()}, but no window is open whose rows could be kept: `verify` one first, or "
            "give 0 for the checkpoint. A window serves once."
        )
    checks.check_accepted(array, np.zeros_like(seq.lengths))


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
      IdentityError: the window is not what this sequence's verify made.
      RollbackError: `k` is not the width, or a count is 0 or out of range.
      NonFiniteError: a recurrent plane is not finite, if that is checked here; the window is still open.
    """
    check_sequence(seq, num_accepted, k)
    window = check_open(seq)
    width = window.tokens.shape[1]
    if checks.whole(k, "k", least=-(2**31)) != width:
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


def _resolved(seq: SequenceState, counts: np.ndarray, *, donate: bool) -> SequenceState:
    """Returns the sequence with `counts` rows of its window committed and the window served."""
    opened = check_open(seq)
    checks.check_opaque(seq.backend.layout, counts, opened.num_valid)
    due = _is_due(seq, counts)
    donate = donate and not due
    rows, window, shared = counts.astype(np.int32), opened.window, _shared(seq, donate)
    if seq.strategy == "rerun":
        check_params(opened.params)
        tokens = _unpadded(opened)
        state, _ = launch.extend(
            seq.backend, opened.params, seq.state, tokens, rows, logits="none", donate=donate, shared=shared
        )
    else:
        state = launch.commit(
            seq.backend, window.state, window.trace, rows, mode=window.mode, donate=donate, shared=shared
        )
    advanced = _advanced(dataclasses.replace(seq, opened=None), state, opened.tokens, counts, due=due)
    _serve(opened)
    return advanced


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
    patched = still_patched(seq, saved.patched, saved.planes)
    return went_back(seq, layout.unflatten(leaves), saved.lengths, patched, saved.edit)


def still_patched(seq: SequenceState, then: frozenset[int], kept: Iterable[int]) -> frozenset[int]:
    """Returns what is patched once the planes `kept` are those of a time when `then` were.

    A patch of any other plane stays: lowering a length does not take back what rows below it became.
    """
    return then | (seq.patched - frozenset(kept))


def went_back(
    seq: SequenceState,
    state: PyTree,
    lengths: np.ndarray,
    patched: frozenset[int],
    edit: Edit | None,
) -> SequenceState:
    """Returns the sequence at `lengths` `[B]` of its own tokens, with the planes of `state`.

    `patched` are the planes of it that were patched, and `edit` the last edit before it.
    """
    tokens = tuple(row[:length] for row, length in zip(seq.tokens, lengths, strict=True))
    # What was kept of tokens that are now gone belongs to another history.
    ring = seq.ring.truncated(int(lengths.min()))
    saved = {entry.slot: seq.saved[entry.slot] for entry in ring.entries}
    kept = seq.checkpoint
    if kept is not None and (kept.lengths > lengths).any():
        kept = None
    before = seq.backend.layout.leaves(seq.state)
    after = seq.backend.layout.leaves(state)
    lent = tuple(i for i, leaf in enumerate(after) if leaf is before[i])
    return dataclasses.replace(
        seq,
        state=state,
        tokens=tokens,
        ring=ring,
        saved=saved,
        checkpoint=kept,
        marked=(),
        pending=(),
        lent=lent,
        patched=patched,
        edit=edit,
        saved_patched={slot: seq.saved_patched.get(slot, frozenset()) for slot in saved},
        saved_edits={slot: seq.saved_edits.get(slot) for slot in saved},
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
            f"{back.max()} are asked for (to {lengths.tolist()}, from {seq.highest.tolist()}): the rows are gone, or "
            "may be, if `begin` was not told the `highest` row of the state it was given."
        )


def _serve(opened: OpenWindow) -> None:
    opened.ticket.is_served = True


def _checked_counts(seq: SequenceState, num_accepted: IntLike) -> np.ndarray:
    opened = check_open(seq)
    return checks.check_accepted(num_accepted, opened.num_valid)


def _check_room(seq: SequenceState, counts: np.ndarray) -> None:
    layout = seq.backend.layout
    checks.check_room(layout, seq.lengths, counts, layout.capacity(layout.leaves(seq.state)))


def _shared(seq: SequenceState, donate: bool) -> tuple[int, ...]:
    """Returns the indices of the live planes that a donation must spare: somebody else holds them too."""
    if not donate:
        return ()
    leaves = seq.backend.layout.leaves(seq.state)
    kept = [*seq.saved.values(), *([] if seq.checkpoint is None else [seq.checkpoint.planes])]
    return tuple(sorted({*seq.lent, *(i for planes in kept for i, plane in planes.items() if leaves[i] is plane)}))


def _is_due(seq: SequenceState, counts: np.ndarray) -> bool:
    """Returns whether a finite check is due once `counts` `[B]` more tokens are taken."""
    return seq.finite_every is not None and seq.unchecked + counts.max(initial=0) >= seq.finite_every


def _advanced(seq: SequenceState, state: PyTree, tokens: np.ndarray, counts: np.ndarray, *, due: bool) -> SequenceState:
    """Returns the sequence with `counts` `[B]` of `tokens` `[B, T]` appended, found finite if that is `due`."""
    pairs = zip(seq.tokens, tokens, counts, strict=True)
    appended = tuple(np.concatenate([row, new[:count].astype(np.int32)]) for row, new, count in pairs)
    highest = np.maximum(seq.highest, seq.lengths + counts)
    if due:
        check_planes(seq.backend, state, seq.lengths + counts)
    unchecked = 0 if due else seq.unchecked + int(counts.max(initial=0))
    advanced = dataclasses.replace(
        seq, state=state, tokens=appended, highest=highest, pending=(), unchecked=unchecked, lent=()
    )
    return with_mark(advanced)


def with_mark(seq: SequenceState) -> SequenceState:
    """Marks the raw state of a patched sequence too, for whoever takes it out; returns the sequence."""
    if seq.patched:
        layout = seq.backend.layout
        leaves = layout.leaves(seq.state)
        # Rows written since are past the length once the sequence goes back, so they need no mark.
        mark([leaves[i] for i in {*layout.indices(*_KEPT), *seq.patched}])
    return seq

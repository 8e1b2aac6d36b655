"""The ring's device side, and the asynchronous variants.

A save refers to the recurrent planes as they are, so it copies nothing; the next donating
transition leaves what is referred to alone and writes elsewhere. What a slot held is free
once it is overwritten or rolled back past.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import RollbackError, UnsupportedError
from statecore._pytree import check_alive, is_deleted
from statecore._typing import IntLike
from statecore.ssm._doors import check_closed, check_sequence
from statecore.ssm._operations import check_can_go_back, checkpoint, rollback, still_patched, went_back
from statecore.ssm._sequence import SequenceState

# Attention rows are not saved: they go back by their length.
_SAVED = ("shift", "recurrent")


def ring_slots(seq: SequenceState) -> int:
    """Returns how many slots the sequence's ring has; 0 means that it has none."""
    check_sequence(seq)
    return seq.ring.num_slots


def save_ring(seq: SequenceState, slot: int | None = None) -> SequenceState:
    """Returns the sequence with its recurrent planes kept, bit for bit, in a ring slot. Copies nothing.

    Args:
      seq: without an open window, all sequences of one length.
      slot: where; the ring's next slot if None. What it held is gone.

    Raises:
      RollbackError: the ring has no such slot.
      LifecycleError: a window is open.
      UnsupportedError: the sequences have different lengths, so that no one length names the save.
    """
    check_closed(seq, slot)
    ring, slot = seq.ring.record(_one_length(seq), slot)
    leaves = seq.backend.layout.leaves(seq.state)
    live = {i: leaves[i] for i in seq.backend.layout.indices(*_SAVED)}
    return dataclasses.replace(
        seq,
        ring=ring,
        saved=seq.saved | {slot: live},
        saved_patched=seq.saved_patched | {slot: seq.patched},
        saved_edits=seq.saved_edits | {slot: seq.edit},
    )


def restore_ring(seq: SequenceState, slot: int) -> SequenceState:
    """Returns the sequence as it was when `slot` was saved; the slot may be restored again.

    Attention rows are shared with `seq`, not copied, and the next transition spares them.
    Later saves of the ring are dropped with the tokens they held.

    Raises:
      RollbackError: the slot does not exist or holds nothing, or a plane cannot go back so far.
      LifecycleError: a window is open.
    """
    check_closed(seq, slot)
    entry = seq.ring.entry_in(slot)
    if entry.position > seq.lengths.min():
        raise RollbackError(f"Ring slot {slot} holds {entry.position} tokens, but the sequences only {seq.lengths}.")
    lengths = np.full(len(seq.tokens), entry.position)
    check_can_go_back(seq, lengths)
    layout = seq.backend.layout
    leaves = layout.leaves(seq.state)
    for i, plane in seq.saved[slot].items():
        leaves[i] = plane
    check_alive(zip(layout.paths, leaves, strict=True), "ring slot")
    leaves[layout.position] = jnp.asarray(lengths, jnp.int32)
    patched = still_patched(seq, seq.saved_patched.get(slot, frozenset()), seq.saved[slot])
    return went_back(seq, layout.unflatten(leaves), lengths, patched, seq.saved_edits.get(slot))


def start_checkpoint(seq: SequenceState) -> SequenceState:
    """Returns the sequence with a checkpoint; there is nothing to wait for, since nothing is copied."""
    return checkpoint(seq)


def start_rollback_and_checkpoint(seq: SequenceState, num_accepted: IntLike) -> SequenceState:
    """Rolls back to `num_accepted` rows and checkpoints there, without waiting for the device.

    The live state and the checkpoint are both the state after the rows. Errors of the
    request raise here; errors of the device raise at `sync`.
    """
    rolled = checkpoint(rollback(seq, num_accepted))
    return dataclasses.replace(rolled, pending=tuple(jax.tree.leaves(rolled.state)))


def sync(seq: SequenceState) -> SequenceState:
    """Waits for what was started and raises its late errors; does nothing if nothing was.

    A later transition waits for what it continues from, so it leaves nothing to sync; so
    does a verify, and with a window open there is nothing to wait for. What was donated
    meanwhile was waited for by what took it.
    """
    check_sequence(seq)
    jax.block_until_ready([leaf for leaf in seq.pending if not is_deleted(leaf)])
    return dataclasses.replace(seq, pending=()) if seq.pending else seq


def _one_length(seq: SequenceState) -> int:
    lengths = set(seq.lengths.tolist())
    if len(lengths) != 1:
        raise UnsupportedError(
            f"The sequences have {seq.lengths.tolist()} tokens; a ring slot is named by one length. Keep a sequence "
            "for each row, or save when they are level."
        )
    return lengths.pop()

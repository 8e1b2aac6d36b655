"""The ring's device side: saving recurrent planes into a slot, and taking them back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import UnsupportedError
from statecore._typing import IntLike
from statecore.ssm._operations import check_can_go_back, checkpoint, rollback, went_back
from statecore.ssm._sequence import SequenceState

# Attention rows are not saved: they go back by their length.
_SAVED = ("shift", "recurrent")


def ring_slots(seq: SequenceState) -> int:
    """Returns how many slots the sequence's ring has; 0 means that it has none."""
    return seq.ring.num_slots


def save_ring(seq: SequenceState, slot: int | None = None) -> SequenceState:
    """Returns the sequence with its recurrent planes saved, bit for bit, in a ring slot.

    Args:
      seq: without an open window, all sequences of one length.
      slot: where; the ring's next slot if None. What it held is gone.

    Raises:
      RollbackError: the ring has no such slot.
      LifecycleError: a window is open.
      UnsupportedError: the sequences have different lengths, so that no one length names the save.
    """
    checkpoint(seq)  # refuses an open window
    ring, slot = seq.ring.record(_one_length(seq), slot)
    leaves = seq.backend.layout.leaves(seq.state)
    live = {i: leaves[i] for i in seq.backend.layout.indices(*_SAVED)}
    planes = seq.ring_planes
    if planes is None:
        planes = {i: jnp.zeros((ring.num_slots, *leaf.shape), leaf.dtype) for i, leaf in live.items()}
    run = seq.backend.compile(("save ring",), lambda: jax.jit(_save))
    return dataclasses.replace(seq, ring=ring, ring_planes=run(planes, live, np.int32(slot)))


def restore_ring(seq: SequenceState, slot: int) -> SequenceState:
    """Returns the sequence as it was when `slot` was saved; the slot may be restored again.

    Later saves of the ring are dropped with the tokens they held.

    Raises:
      RollbackError: the slot does not exist or holds nothing, or a plane cannot go back so far.
      LifecycleError: a window is open.
    """
    checkpoint(seq)
    entry = seq.ring.entry_in(slot)
    lengths = np.full(len(seq.tokens), entry.position)
    check_can_go_back(seq, lengths)
    layout = seq.backend.layout
    leaves = layout.leaves(seq.state)
    run = seq.backend.compile(("restore ring",), lambda: jax.jit(_load))
    assert seq.ring_planes is not None  # the ring has an entry, so something was saved
    for i, plane in run(seq.ring_planes, np.int32(slot)).items():
        leaves[i] = plane
    leaves[layout.position] = jnp.asarray(lengths, jnp.int32)
    return went_back(seq, layout.unflatten(leaves), lengths)


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
    """Waits for what was started and raises its late errors; does nothing if nothing was."""
    jax.block_until_ready(seq.pending)
    return dataclasses.replace(seq, pending=()) if seq.pending else seq


def _one_length(seq: SequenceState) -> int:
    lengths = set(seq.lengths.tolist())
    if len(lengths) != 1:
        raise UnsupportedError(
            f"The sequences have {seq.lengths.tolist()} tokens; a ring slot is named by one length. Keep a sequence "
            "for each row, or save when they are level."
        )
    return lengths.pop()


def _save(planes: dict[int, jax.Array], live: dict[int, jax.Array], slot: jax.Array) -> dict[int, jax.Array]:
    return {i: jax.lax.dynamic_update_index_in_dim(plane, live[i], slot, 0) for i, plane in planes.items()}


def _load(planes: dict[int, jax.Array], slot: jax.Array) -> dict[int, jax.Array]:
    return {i: jax.lax.dynamic_index_in_dim(plane, slot, 0, keepdims=False) for i, plane in planes.items()}

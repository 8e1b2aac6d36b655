"""Reordering the sequences of a `SequenceState`, with everything that is kept of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from statecore._typing import IntLike
from statecore.backend import take_rows as take_state_rows
from statecore.ssm._doors import check_closed
from statecore.ssm._operations import with_mark
from statecore.ssm._sequence import Checkpoint, SequenceState


def take_rows(seq: SequenceState, rows: IntLike) -> SequenceState:
    """Returns the sequence whose row `i` is row `rows[i]`, its checkpoint and ring included.

    Args:
      seq: without an open window.
      rows: `[N]` integers from 0 to `B - 1`, repeated or not.

    Raises:
      LifecycleError: a window is open.
      GeometryError: a row is out of range.
    """
    check_closed(seq, rows)
    state = take_state_rows(seq.backend, seq.state, rows)
    index = np.array(rows, np.int32)
    kept = seq.checkpoint
    if kept is not None:
        planes = _taken(seq, kept.planes, index)
        kept = Checkpoint(planes=planes, lengths=kept.lengths[index], patched=kept.patched, edit=kept.edit)
    taken = dataclasses.replace(
        seq,
        state=state,
        tokens=tuple(seq.tokens[row] for row in index),
        highest=seq.highest[index],
        checkpoint=kept,
        lent=(),
        saved={slot: _taken(seq, planes, index) for slot, planes in seq.saved.items()},
        marked=tuple(seq.marked[row] for row in index) if seq.marked else (),
    )
    return with_mark(taken)


def _taken(seq: SequenceState, planes: dict[int, jax.Array], index: np.ndarray) -> dict[int, jax.Array]:
    axes = {i: seq.backend.layout.planes[i].batch_axis for i in planes}
    return {i: jnp.take(plane, index, axis=axes[i]) for i, plane in planes.items()}

"""Editing the state of a sequence, which is marked from then on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from statecore.ssm._doors import check_closed
from statecore.ssm._operations import with_mark
from statecore.ssm._sequence import Edit, SequenceState
from statecore.state import find_part
from statecore.state import patch as patch_state


def patch(seq: SequenceState, path: str, fn: Callable[[jax.Array], Any]) -> SequenceState:
    """Returns the sequence with `fn` applied to a plane or a layer's part; see `statecore.patch`.

    Every later operation keeps the mark. Going back to a checkpoint or a ring slot from
    before the patch takes it back with a shift or recurrent plane; that of any other plane
    stays, since its rows stay.

    Raises:
      LifecycleError: a window is open.
      GeometryError, UnsupportedError, StateConsumedError: as `statecore.patch`.
    """
    check_closed(seq)
    layout = seq.backend.layout
    state = patch_state(seq.state, path, fn, planes=layout)
    leaf = find_part(layout.paths, layout.planes, path).leaf
    edited = dataclasses.replace(seq, state=state, patched=seq.patched | {leaf}, edit=Edit(), marked=(), pending=())
    return with_mark(edited)

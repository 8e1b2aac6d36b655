"""`SequenceState`: a state that knows its tokens, its checkpoint, its ring and its open window."""

import dataclasses
from typing import Any

import jax
import numpy as np

from statecore._identity import Mark
from statecore._typing import PyTree
from statecore.backend import Backend, Window
from statecore.ssm._ring import Ring
from statecore.state import notebook_html


class Edit(Mark):
    """Marks one edit by hand: states of the same tokens after the same last edit are the same."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What takes a sequence back to one point. Holds references and copies nothing.

    planes: by plane index, the position, shift and recurrent planes as they were.
    lengths: `[B]`, tokens held then; append and sliding rows go back by it.
    patched: the planes that had been patched then.
    edit: the last edit before it; None if there was none.
    """

    planes: dict[int, jax.Array]
    lengths: np.ndarray
    patched: frozenset[int] = frozenset()
    edit: Edit | None = None


class Ticket:
    """Marks one open window: what its verify made, by identity, and whether it was served."""

    def __init__(self) -> None:
        self.parts: tuple[object, ...] = ()
        self.is_served = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenWindow:
    """A verify that has not been resolved.

    window: its state, logits and trace.
    tokens: `[B, K]`, what was verified, of which `num_valid` `[B]` rows count.
    params: kept only by the strategy `rerun`, which runs the model again.
    ticket: serves once, whatever copies of the sequence are held.
    """

    window: Window
    tokens: np.ndarray
    num_valid: np.ndarray
    params: PyTree
    ticket: Ticket


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SequenceState:
    """A state with what a decoder around it must know. Every operation returns a new one.

    backend: of the state.
    state: the live state; always what `tokens` gives, never a draft, unless it was patched.
    tokens: of each sequence, all that the state was fed.
    strategy: how a window is undone: `replay`, `select` or `rerun`.
    highest: `[B]`, the highest row ever written plus one, which limits what a ring can undo.
    ring: the bookkeeping of the decode-rollback ring.
    saved: by ring slot, what was saved there: references, as in a checkpoint.
    checkpoint: at most one.
    opened: at most one window.
    pending: arrays that an asynchronous operation has dispatched and nobody has waited for.
    finite_every: check that recurrent planes are finite after each chunk and whenever so
      many tokens were taken since the last check; None checks only when asked.
    unchecked: tokens taken since that check.
    lent: indices of planes that the sequence this one went back from holds too; a donating
      transition leaves them alone.
    marked: by sequence, the full blocks of tokens at its last checkpoint in a prefix cache.
    patched: the planes that were edited by hand, so that the state is not what `tokens` gives.
    edit: the last edit by hand; None if there was none.
    saved_patched: by ring slot, the planes that had been patched when it was saved.
    saved_edits: by ring slot, the last edit before it was saved.
    """

    backend: Backend
    state: PyTree
    tokens: tuple[np.ndarray, ...]
    strategy: str
    highest: np.ndarray
    ring: Ring
    saved: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    opened: OpenWindow | None = None
    pending: tuple[Any, ...] = ()
    finite_every: int | None = None
    unchecked: int = 0
    lent: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    patched: frozenset[int] = frozenset()
    edit: Edit | None = None
    saved_patched: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    saved_edits: dict[int, Edit | None] = dataclasses.field(default_factory=dict)

    @property
    def is_patched(self) -> bool:
        """Whether anything but its tokens made the state, so that no prefix cache may hold it."""
        return bool(self.patched)

    def _repr_html_(self) -> str:
        return notebook_html("show_sequence", self)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each sequence holds, `[B]`."""
        return np.array([len(row) for row in self.tokens])

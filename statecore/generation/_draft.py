"""What a draft is: something that guesses the tokens to come."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np

from statecore.runtime import Runtime


class Draft(Protocol):
    """Guesses tokens; a wrong guess costs time, never a wrong token.

    num_draft: the most tokens guessed at once; a window has one row more, the anchor.
    """

    @property
    def num_draft(self) -> int: ...

    def propose(self, history: Sequence[int], limit: int) -> list[int]:
        """Returns up to `limit` tokens that may follow `history`, or none."""
        ...


class DraftState(Protocol):
    """What a draft carries from round to round in one run; it is saved and restored with the run."""

    @property
    def nbytes(self) -> int:
        """Bytes that a copy takes."""
        ...

    def copy(self) -> "DraftState":
        """Returns an independent copy, which nothing that becomes of this one changes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """Where the sequences of a run are, for a draft that has a state.

    histories: prompt and output of each sequence.
    limits: tokens to guess for each, 0 for none.
    capacity: tokens that each may come to hold.
    cuts: float32 `[4]`, temperature, top_k, top_p and min_p of the run; None for a greedy one.
    key: of the run; None for a greedy one.
    emitted: `[B]` int32, tokens emitted: the index of the output that the first draft would be.
    """

    histories: list[list[int]]
    limits: np.ndarray
    capacity: int
    cuts: np.ndarray | None
    key: jax.Array | None
    emitted: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """Guesses for every sequence.

    tokens: of each sequence, as many as were guessed.
    probs: `[B, num_draft, V]`, the distributions that they were drawn from; None for guesses that are certain.
    """

    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    probs: jax.Array | None = None


# `guess(history[B, H], length[B], limit) -> (tokens[B, limit], found[B])`: as `Draft.propose`, traceable, for every
# sequence at once. A draft that has one as `device_guess` is followed in a loop on the device where nothing
# needs the host. One object for one way to guess.
Guess = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]


# `rule(key, indices, logits, window, num_valid, probs)` gives how many drafts are accepted, `[B]`, and
# the tokens emitted, `[B, K]`; traceable. See `statecore.speculative.accept_sampled`.
Rule = Callable[..., Any]


class StatefulDraft(Protocol):
    """Guesses for all sequences at once, from a state that follows what the run has emitted.

    The draft is a description and does not change; what changes is the state, which the run
    owns: a snapshot has it, a fork copies it, and it is lost only if a call is cut short.

    num_draft: the most tokens guessed at once.
    rule: how guesses with probabilities are accepted in a sampled run; None to accept those
      that plain decoding would draw, so that the output is that of plain decoding.
    is_lossless: whether the output under `rule` is distributed as plain decoding's.
    """

    @property
    def num_draft(self) -> int: ...

    @property
    def rule(self) -> Rule | None: ...

    @property
    def is_lossless(self) -> bool: ...

    def check(self, runtime: Runtime) -> None:
        """Raises a StateError if the draft cannot guess for this runtime; runs nothing."""
        ...

    def propose_rows(self, state: Any, drawing: Drawing) -> tuple[Any, Proposal]:
        """Returns guesses, and the state that waits for `settle`. Donates `state`; None is a fresh one."""
        ...

    def settle(self, state: Any, num_rows: np.ndarray) -> Any:
        """Returns the state with what was emitted, and none of the guesses besides. Donates `state`.

        Args:
          state: from `propose_rows`.
          num_rows: `[B]`, tokens emitted in the round; all but the last of them were guessed.
        """
        ...


# What `speculate=` takes.
AnyDraft = Draft | StatefulDraft


def is_stateful(draft: object) -> TypeGuard[StatefulDraft]:
    """Returns whether a draft keeps a state of its own."""
    # Not by the protocol, which would read the properties of a draft that was not yet checked.
    return hasattr(type(draft), "propose_rows")

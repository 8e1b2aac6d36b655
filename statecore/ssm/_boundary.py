"""Going back to the last well-formed place of a text, to let it go on differently.

A loop in the text is cut at the last boundary (a newline, the end of a sentence) from
which going on is possible. Nothing is injected. `plan_boundary_rollback` only decides;
`apply_boundary_rollback` does what was decided.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from statecore._errors import RollbackError, UnsupportedError
from statecore.backend import Tokenizer, checks
from statecore.ssm._operations import check_can_go_back, has_ssm_layers, rollback_unsupported, went_back
from statecore.ssm._saves import restore_ring
from statecore.ssm._sequence import SequenceState

# A text that was steered anew twice and loops again will not get better.
MAX_ROLLBACKS = 2


class Decline(enum.Enum):
    """Why a rollback is declined; the first reason that applies, in this order."""

    DISABLED = "boundary rollback is switched off"
    STREAM_UNSAFE = "tokens were streamed to somebody and cannot be taken back"
    NOT_REWINDABLE = "a plane cannot be taken back"
    CAP_REACHED = "the text was rolled back as often as is allowed"
    NO_BOUNDARY = "there is no boundary to go back to"
    NO_SNAPSHOT = "no boundary has its recurrent state in the ring"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a boundary rollback would do.

    decline: why it does nothing; None if it goes ahead.
    keep: output tokens kept, the boundary included.
    dropped: output tokens dropped.
    slot: the ring slot to restore; None for a state without recurrent planes.
    planned_at: tokens the sequence held when this was decided; it is stale at any other length.
    target: tokens the sequence holds afterwards.
    """

    decline: Decline | None = None
    keep: int = 0
    dropped: int = 0
    slot: int | None = None
    planned_at: int = 0
    target: int = 0


def boundary_mask(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Returns which tokens `[V]` end with a newline or the end of a sentence."""
    return np.array([_is_boundary(tokenizer.decode([token])) for token in range(vocab_size)])


def _is_boundary(text: str) -> bool:
    return text.endswith("\n") or text.rstrip(" \"')]”’").endswith((".", "!", "?"))


def plan_boundary_rollback(
    seq: SequenceState,
    mask: np.ndarray | None,
    *,
    num_prompt: int,
    min_drop: int,
    num_rollbacks: int = 0,
    is_enabled: bool = True,
    is_streamed: bool = False,
) -> Decision:
    """Decides whether and where the text can go back. Changes nothing.

    Args:
      seq: of one sequence.
      mask: `[V]`, the boundary tokens; None if they are not known.
      num_prompt: tokens of the prompt, which are never dropped.
      min_drop: output tokens to drop at least.
      num_rollbacks: how often this text went back before.
      is_enabled: whether the caller wants this at all.
      is_streamed: whether tokens have left and cannot be taken back.

    Raises:
      UnsupportedError: the state has more than one sequence.
    """
    checks.whole(num_prompt, "num_prompt")
    checks.whole(min_drop, "min_drop")
    if len(seq.tokens) != 1:
        raise UnsupportedError(f"A boundary rollback is of one text, but this state has {len(seq.tokens)} sequences.")
    reasons = (
        (not is_enabled, Decline.DISABLED),
        (is_streamed, Decline.STREAM_UNSAFE),
        (bool(rollback_unsupported(seq)), Decline.NOT_REWINDABLE),
        (num_rollbacks >= MAX_ROLLBACKS, Decline.CAP_REACHED),
        (mask is None, Decline.NO_BOUNDARY),
        (has_ssm_layers(seq) and seq.ring.num_slots == 0, Decline.NO_SNAPSHOT),
    )
    for applies, reason in reasons:
        if applies:
            return Decision(decline=reason)
    assert mask is not None
    return _search(seq, mask, seq.tokens[0][num_prompt:].tolist(), num_prompt, min_drop)


def _search(seq: SequenceState, mask: np.ndarray, output: Sequence[int], num_prompt: int, min_drop: int) -> Decision:
    decline = Decline.NO_BOUNDARY
    for index in range(len(output) - 1 - min_drop, -1, -1):
        if output[index] >= len(mask):
            raise RollbackError(f"The boundary mask has {len(mask)} tokens, but the text has token {output[index]}.")
        if not mask[output[index]]:
            continue
        keep = index + 1
        slot = seq.ring.slot_at(num_prompt + keep) if has_ssm_layers(seq) else None
        if slot is not None or not has_ssm_layers(seq):
            dropped, target = len(output) - keep, num_prompt + keep
            return Decision(keep=keep, dropped=dropped, slot=slot, planned_at=num_prompt + len(output), target=target)
        decline = Decline.NO_SNAPSHOT
    return Decision(decline=decline)


def apply_boundary_rollback(seq: SequenceState, decision: Decision) -> SequenceState:
    """Returns the sequence at the boundary decided on.

    Raises:
      RollbackError: the decision was to decline, or a ring no longer holds the rows.
    """
    if decision.decline is not None:
        raise RollbackError(f"The rollback was declined: {decision.decline.value}.")
    held = None if decision.slot is None else seq.ring.slot_at(decision.target)
    if seq.lengths.tolist() != [decision.planned_at] or held != decision.slot:
        raise RollbackError(
            f"This decision was made at {decision.planned_at} tokens, to go back to {decision.target} in ring slot "
            f"{decision.slot}; the sequence has moved since. Plan again."
        )
    if decision.slot is not None:
        return restore_ring(seq, decision.slot)
    lengths = seq.lengths - decision.dropped
    check_can_go_back(seq, lengths)
    state = seq.backend.layout.with_lengths(seq.state, jnp.asarray(lengths, jnp.int32))
    return went_back(seq, state, lengths)

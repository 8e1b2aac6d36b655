"""Going back to the last well-formed place of a text, to let it go on differently.

A loop in the text is cut at the last boundary (a newline, the end of a sentence) from
which going on is possible. Nothing is injected. `plan_boundary_rollback` only decides;
`apply_boundary_rollback` does what was decided.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, RollbackError, UnsupportedError
from statecore.backend import Tokenizer, checks
from statecore.ssm._doors import check_closed
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
    text: digest of the tokens it was decided on; no other text can follow it.
    """

    decline: Decline | None = None
    keep: int = 0
    dropped: int = 0
    slot: int | None = None
    planned_at: int = 0
    target: int = 0
    text: str = ""


def boundary_mask(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Returns which tokens `[V]` end with a newline or the end of a sentence; GeometryError without a tokenizer."""
    if not hasattr(tokenizer, "decode"):
        raise GeometryError(f"The boundaries of a text come from its tokenizer, but was given {tokenizer!r}.")
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
      seq: of one sequence, without an open window.
      mask: `[V]` bool, the boundary tokens; None if they are not known.
      num_prompt: tokens of the prompt, which are never dropped.
      min_drop: output tokens to drop at least.
      num_rollbacks: how often this text went back before.
      is_enabled: whether the caller wants this at all.
      is_streamed: whether tokens have left and cannot be taken back.

    Raises:
      UnsupportedError: the state has more than one sequence.
      LifecycleError: a window is open.
      GeometryError: a number is not a whole one, or the mask is not `[V]`.
    """
    check_closed(seq)
    checks.whole(num_prompt, "num_prompt")
    checks.whole(min_drop, "min_drop")
    checks.whole(num_rollbacks, "num_rollbacks")
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
    return _search(seq, _checked_mask(mask), seq.tokens[0][num_prompt:].tolist(), num_prompt, min_drop)


def _checked_mask(mask: object) -> np.ndarray:
    array = np.asarray(mask)
    if array.ndim != 1 or array.dtype != bool:
        raise GeometryError(
            f"A boundary mask is bool[V], one for each token, but this one is {array.dtype}{list(array.shape)}. "
            "`boundary_mask` makes it from a tokenizer."
        )
    return array


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
            if not _can_go_back(seq, num_prompt + keep):
                return Decision(decline=Decline.NOT_REWINDABLE)  # nor to any earlier one
            return Decision(
                keep=keep,
                dropped=len(output) - keep,
                slot=slot,
                planned_at=num_prompt + len(output),
                target=num_prompt + keep,
                text=_digest(seq),
            )
        decline = Decline.NO_SNAPSHOT
    return Decision(decline=decline)


def _can_go_back(seq: SequenceState, length: int) -> bool:
    try:
        check_can_go_back(seq, np.array([length]))
    except RollbackError:
        return False
    return True


def _digest(seq: SequenceState) -> str:
    return hashlib.sha256(seq.tokens[0].tobytes()).hexdigest()


def apply_boundary_rollback(seq: SequenceState, decision: Decision) -> SequenceState:
    """Returns the sequence at the boundary decided on.

    Raises:
      RollbackError: the decision was to decline, was made on another text, or a ring no
        longer holds the rows.
      LifecycleError: a window is open.
    """
    check_closed(seq)
    if not isinstance(decision, Decision):
        raise GeometryError(f"A rollback follows a Decision, but was given {decision!r}. Plan it first.")
    if decision.decline is not None:
        raise RollbackError(f"The rollback was declined: {decision.decline.value}.")
    held = None if decision.slot is None else seq.ring.slot_at(decision.target)
    is_same = seq.lengths.tolist() == [decision.planned_at] and decision.text == _digest(seq)
    if not is_same or held != decision.slot:
        raise RollbackError(
            f"This decision was made at {decision.planned_at} tokens, to go back to {decision.target} in ring slot "
            f"{decision.slot}; the sequence has moved since, or is another text. Plan again."
        )
    if decision.slot is not None:
        return restore_ring(seq, decision.slot)
    lengths = seq.lengths - decision.dropped
    check_can_go_back(seq, lengths)
    state = seq.backend.layout.with_lengths(seq.state, jnp.asarray(lengths, jnp.int32))
    return went_back(seq, state, lengths, seq.patched, seq.edit)

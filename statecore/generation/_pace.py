"""How far drafts pay: measured by what windows emit, so that a run drafts less, or not, where they do not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_RATE = 0.2  # of the running mean: about the last five windows count
_FIRST_REST, _MOST_REST = 4, 64
_LEAST_HALVED = 6


class Pace(NamedTuple):
    """How drafting has gone; numbers on the host, scalars on the device.

    gain: tokens that a window emits for each sequence, a running mean; below 0 before the first.
    wait: rounds to go without a draft.
    rest: how long the last wait was; 0 where drafts pay.
    """

    gain: Any = np.float32(-1)
    wait: Any = np.int32(0)
    rest: Any = np.int32(0)


def most_drafts(pace: Pace, num_draft: int) -> Any:
    """Returns how many tokens to guess now, 1 to `num_draft`: about twice as many as were accepted of late."""
    xp = jnp if isinstance(pace.gain, jax.Array) else np
    wanted = xp.ceil(2 * (pace.gain - 1)) + 1
    return xp.where(pace.gain < 0, num_draft, xp.clip(wanted, 1, num_draft)).astype(np.int32)


def widths_of(num_draft: int) -> tuple[int, ...]:
    """Returns the widths that windows are padded to, each compiled once: two where one may be much too wide."""
    return (num_draft // 2 + 1, num_draft + 1) if num_draft >= _LEAST_HALVED else (num_draft + 1,)


def after_window(pace: Pace, got: Any, worth: Any) -> Pace:
    """Returns the pace after a window that emitted `got` tokens a live sequence.

    Where the mean falls below `worth`, nothing is drafted for some rounds, twice as many each
    time up to 64; the one window after them decides whether it is tried on.
    """
    xp = jnp if isinstance(got, jax.Array) else np
    gain = xp.where(pace.gain < 0, xp.maximum(got, worth), pace.gain + np.float32(_RATE) * (got - pace.gain))
    is_poor = gain < worth
    rest = xp.where(is_poor, xp.clip(2 * pace.rest, _FIRST_REST, _MOST_REST), xp.where(got > worth, 0, pace.rest))
    return Pace(
        gain=xp.where(is_poor, worth, gain).astype(np.float32),
        wait=xp.where(is_poor, rest, 0).astype(np.int32),
        rest=rest.astype(np.int32),
    )


def after_step(pace: Pace) -> Pace:
    """Returns the pace after a round without a window."""
    xp = jnp if isinstance(pace.wait, jax.Array) else np
    return pace._replace(wait=xp.maximum(pace.wait - 1, 0).astype(np.int32))

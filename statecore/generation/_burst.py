"""Several tokens in one call: the loop of plain decoding on the device.

A token that the host need not see before the next is drawn costs it nothing: no dispatch,
no fetch. What must be looked at token by token (constraints, stop strings, forced tokens,
drafts, boundaries, loops) goes by plain rounds.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from statecore.backend import launch
from statecore.generation._round import look_ahead, take
from statecore.generation._run import Run
from statecore.generation._sampler_state import SamplerState, advance
from statecore.generation._sampling import Array, Draws, draw_traced, drawn_tokens, settings_of
from statecore.runtime import Runtime

# Tokens of one call: few enough that a pause is taken up soon, enough that the host's part is small.
BURST = 8


@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picking:
    """What drawing carries from token to token on the device.

    settings: of the sampler, as arrays.
    sampling: key, counts and mu.
    emitted: `[B]` int32, tokens emitted so far.
    left: `[B]` int32, tokens that each sequence may still take; 0 once it has ended.
    stops: `[S]` int32, tokens that end a sequence; None for none.
    """

    settings: tuple
    sampling: SamplerState
    emitted: Array
    left: Array
    stops: Array | None

    @property
    def live(self) -> Array:
        """Which sequences go on, `[B]` bool."""
        return self.left > 0


class Picked(NamedTuple):
    """What one step gives; stacked, `[N, B]`: tokens, who took them, and what was asked for beside."""

    draws: Draws
    live: Array


@functools.lru_cache(maxsize=64)
def _pick(num_logprobs: int | None) -> launch.Pick:
    """Returns the function that draws one token of each live sequence; one object for each `num_logprobs`."""

    def pick(picking: Picking, logits: jax.Array, tokens: jax.Array):
        live = picking.live
        draws = draw_traced(
            picking.settings, picking.sampling, jnp.asarray(picking.emitted)[:, None], logits, num_logprobs
        )
        drawn = draws.tokens[:, 0]
        sampling = advance(picking.sampling, draws.tokens, live.astype(jnp.int32), draws.mus)
        left = jnp.where(live, picking.left - 1, 0)
        if picking.stops is not None:
            left = jnp.where((drawn[:, None] == picking.stops).any(axis=1), 0, left)
        after = dataclasses.replace(picking, sampling=sampling, emitted=picking.emitted + live, left=left)
        # A draw without a choice is an error once it is on the host; until then any token will do.
        return after, jnp.where(live & (drawn >= 0), drawn, tokens), Picked(draws, live)

    return pick


def can_burst(run: Run, limits: list[int]) -> bool:
    """Returns whether the next tokens need not be looked at one by one, and are enough."""
    return is_unwatched(run) and max(limits) >= BURST


def is_unwatched(run: Run) -> bool:
    """Returns whether the next tokens need not be looked at one by one."""
    watched = run.stops.strings.strings or run.saves is not None or run.guard is not None or run.unread is not None
    is_free = run.forced.array() is None and all(one is None for one in run.constraints)
    return is_free and not watched


def burst(runtime: Runtime, run: Run, limits: list[int]) -> None:
    """Emits up to `BURST` tokens of each sequence, no more than its limit, in one call."""
    counts = np.minimum(limits, BURST)
    may_end = bool(run.stops.tokens) or bool((counts < BURST).any())
    picking = Picking(
        settings=settings_of(run.sampler, runtime.vocab_size),
        sampling=dataclasses.replace(run.sampling, key=None) if run.sampler.is_greedy else run.sampling,
        emitted=np.array([len(row.output) for row in run.rows], np.int32),
        left=counts.astype(np.int32),
        stops=np.array(sorted(run.stops.tokens), np.int32) if run.stops.tokens else None,
    )
    _, picked = runtime.decode(
        run.pending(), picking, _pick(run.num_logprobs), num_tokens=BURST, counts=counts if may_end else None
    )
    # `[N, B, 1, ...]` to the rows of a window, `[B, N, ...]`.
    draws: Draws = jax.tree.map(lambda leaf: np.moveaxis(leaf[:, :, 0], 0, 1), picked.draws)
    live = picked.live.T
    chosen = drawn_tokens(draws, live)
    take(run, chosen, look_ahead(run, chosen, live.sum(axis=1)), draws)

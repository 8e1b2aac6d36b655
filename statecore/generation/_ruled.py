"""Drawing by a rule of acceptance: the distributions at each row of a window, and what the rule makes of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from statecore.generation._draft import Rule
from statecore.generation._draw_checks import check_choices, check_shapes, check_state
from statecore.generation._sampler import Sampler, kept_logits
from statecore.generation._sampler_state import SamplerState
from statecore.generation._sampling import Array, Draws, rows_of, scores_of, settings_of, with_logprobs


def draw_ruled(
    rule: Rule,
    sampler: Sampler,
    state: SamplerState,
    indices: Array,
    logits: jax.Array,
    *,
    window: Array,
    num_valid: Array,
    probs: jax.Array | None,
    allowed: Array | None,
    live: Array,
    num_logprobs: int | None,
) -> tuple[Draws, jax.Array]:
    """Returns what a window emits under `rule`, and how many of its drafts were accepted, `[B]`.

    Each row's distribution is the one that plain decoding draws from: after penalties, bias,
    mask, temperature and cuts, as if the drafts before it had been emitted.

    Args:
      rule: see `Rule`.
      sampler, state, indices, logits, allowed, live, num_logprobs: as for `draw`.
      window: `[B, K]` int, the tokens verified.
      num_valid: `[B]` int, rows that have a draft or follow one.
      probs: `[B, K - 1, V]`, what drafts were drawn from; None for certain ones.
    """
    check_shapes(sampler, state, indices, logits, window, allowed, None, live)
    check_state(sampler, state)
    check_choices(logits.shape[-1], allowed, None, live)
    counted = (state.counts, state.in_prompt) if sampler.uses_penalties else (None, None)
    settings = settings_of(sampler, logits.shape[-1])
    return _ruled(
        *settings, state.key, counted, indices, logits, window, num_valid, allowed, probs,
        rule=rule, num_logprobs=num_logprobs,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("rule", "num_logprobs"))
def _ruled(
    settings, bias, key, counted, indices, logits, window, num_valid, allowed, probs, *, rule, num_logprobs
) -> tuple[Draws, jax.Array]:
    counts, in_prompt = counted
    rows = rows_of(logits, counts, window, allowed)

    def kept(in_prompt: Any, at: Any) -> jax.Array:
        scores = scores_of(settings, bias, in_prompt, at)
        # Where nothing can be chosen there is no distribution, and the rule must see that.
        return jnp.where(jnp.isfinite(jnp.max(scores)), kept_logits(scores, settings[:4]), jnp.nan)

    target = jax.vmap(lambda in_prompt, rows: jax.vmap(functools.partial(kept, in_prompt))(rows))(in_prompt, rows)
    num_accepted, tokens = rule(key, indices, target, window, num_valid, probs)
    return with_logprobs(tokens, None, logits, num_logprobs), num_accepted

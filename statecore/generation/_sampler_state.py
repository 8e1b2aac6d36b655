"""What a sampler carries from token to token, and how its settings may change mid-run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from statecore._errors import GeometryError, UnsupportedError
from statecore._pytree import is_traced
from statecore.generation._sampler import Sampler, check_sampler, key_of


@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerState:
    """The sampler's part of a run; immutable, so that a snapshot may share it.

    What the settings do not use is absent (None), so that greedy decoding carries nothing.

    key: a typed key, folded with sequence and index for each draw and never consumed; None
      for a run that was begun greedy without a seed.
    counts: `[B, V]` int32, how often each token stands in the output; None without penalties.
    in_prompt: `[B, V]` bool, which tokens stand in the prompt; None without penalties.
    mu: `[B]` float32, the most surprise in bits that Mirostat keeps; None without Mirostat.
    """

    key: jax.Array | None
    counts: jax.Array | None
    in_prompt: jax.Array | None
    mu: jax.Array | None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def initial_state(
    sampler: Sampler,
    key: jax.Array | None,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab_size: int,
) -> SamplerState:
    """Returns the state of a run with this history. Draws nothing.

    Mirostat starts at `mu = 2 * tau`: what it was before is not in the history.

    Args:
      sampler: the settings.
      key: of the draws; None only for a greedy sampler.
      prompts: the tokens of each sequence's prompt.
      outputs: the tokens each sequence has emitted so far.
      vocab_size: V.

    Raises:
      UnsupportedError: a setting means nothing, or there is no key to sample with.
      GeometryError: not one output a prompt, or a token outside the vocabulary.
    """
    check_sampler(sampler, vocab_size)
    if key is None and not sampler.is_greedy:
        raise UnsupportedError(
            f"temperature is {sampler.temperature}, but the run has no key to draw with. Was it begun greedy, without "
            "a seed? Give a seed."
        )
    if len(prompts) != len(outputs):
        raise GeometryError(f"There are {len(prompts)} prompts and {len(outputs)} outputs; each sequence has both.")
    counts = in_prompt = mu = None
    if sampler.uses_penalties:
        counts = jnp.array([_counted(row, vocab_size) for row in outputs], jnp.int32)
        in_prompt = jnp.array([_counted(row, vocab_size) > 0 for row in prompts])
    if sampler.mirostat is not None:
        mu = jnp.full(len(prompts), 2 * sampler.mirostat.tau, jnp.float32)
    return SamplerState(key=key, counts=counts, in_prompt=in_prompt, mu=mu)


def _counted(row: Sequence[int], vocab_size: int) -> np.ndarray:
    tokens = np.asarray(row, np.int64)
    if tokens.size and not (0 <= tokens.min() and tokens.max() < vocab_size):
        raise GeometryError(f"The history holds tokens outside the vocabulary of {vocab_size}: {list(row)}.")
    return np.bincount(tokens, minlength=vocab_size)


def advance(state: SamplerState, tokens: Any, num_kept: Any, mus: jax.Array | None = None) -> SamplerState:
    """Returns the state after each sequence has emitted its first `num_kept` tokens.

    Counts move by every kept token, not by one a call, and `mu` is what it was after the
    last of them. A sequence that keeps none stays as it is.

    Args:
      state: before; unchanged.
      tokens: `[B, K]` int, the tokens drawn.
      num_kept: `[B]` int, how many of them were emitted, 0 to K. Inside a trace a count out of range keeps none.
      mus: `[B, K]` float32, `mus` of the draws; needed if the state has a `mu`.

    Raises:
      GeometryError: a shape does not fit, a count is out of range, or `mus` is missing.
    """
    if state.counts is None and state.mu is None:
        return state
    if state.mu is not None and mus is None:
        raise GeometryError("The state has Mirostat's mu, but `mus` of the draws was not given.")
    if not is_traced(tokens, num_kept):
        tokens, num_kept = np.asarray(tokens), np.asarray(num_kept)
        if tokens.ndim != 2 or num_kept.shape != tokens.shape[:1]:
            shapes = f"{list(tokens.shape)} and {list(num_kept.shape)}"
            raise GeometryError(f"tokens must be [B, K] and num_kept [B], but are {shapes}.")
        if ((num_kept < 0) | (num_kept > tokens.shape[1])).any():
            raise GeometryError(f"num_kept is {num_kept.tolist()}, but must lie between 0 and {tokens.shape[1]}.")
    counts, mu = _advanced(state.counts, state.mu, tokens, num_kept, None if state.mu is None else mus)
    return dataclasses.replace(state, counts=counts, mu=mu)


@jax.jit
def _advanced(counts, mu, tokens, num_kept, mus):
    width = tokens.shape[1]
    num_kept = jnp.where((num_kept >= 0) & (num_kept <= width), num_kept, 0)
    if counts is not None:
        kept = (jnp.arange(width) < num_kept[:, None]) & (tokens >= 0)
        past = counts.shape[-1]  # dropped
        add = jax.vmap(lambda counts, tokens: counts.at[tokens].add(1, mode="drop"))
        counts = add(counts, jnp.where(kept, tokens, past))
    if mu is not None:
        last = jnp.take_along_axis(mus, jnp.maximum(num_kept - 1, 0)[:, None], axis=1)[:, 0]
        mu = jnp.where(num_kept > 0, last, mu)
    return counts, mu


def overridden(
    sampler: Sampler,
    state: SamplerState,
    *,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab_size: int,
    seed: int | jax.Array | None = None,
    **changes: Any,
) -> tuple[Sampler, SamplerState]:
    """Returns sampler and state with some settings changed mid-run. Draws nothing and runs nothing.

    Everything is checked before anything is made. A key is kept whatever the temperature
    becomes, so a run that turns greedy and back goes on in the same stream. A seed changes
    the key alone, never counts or `mu`. Penalties switched on count the whole history;
    Mirostat switched on starts at `2 * tau`, and keeps its `mu` when only tau or eta change.

    Args:
      sampler: the settings so far.
      state: the state so far; unchanged.
      prompts: the tokens of each sequence's prompt.
      outputs: the tokens each sequence has emitted so far.
      vocab_size: V.
      seed: of the draws from here on; None keeps the key.
      **changes: fields of `Sampler`.

    Raises:
      UnsupportedError: no such setting, a setting that means nothing, a seed that is
        none, or sampling in a run that has no key.
    """
    unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(Sampler)})
    if unknown:
        raise UnsupportedError(f"A sampler has no setting named {', '.join(unknown)}.")
    new = dataclasses.replace(sampler, **changes)
    key = state.key if seed is None else key_of(seed)
    fresh = initial_state(new, key, prompts, outputs, vocab_size)
    keeps_counts = new.uses_penalties and state.counts is not None
    keeps_mu = new.mirostat is not None and state.mu is not None
    return new, SamplerState(
        key=key,
        counts=state.counts if keeps_counts else fresh.counts,
        in_prompt=state.in_prompt if keeps_counts else fresh.in_prompt,
        mu=state.mu if keeps_mu else fresh.mu,
    )

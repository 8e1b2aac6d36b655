"""Drawing tokens: a pure function of settings, sampler state and logits."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from statecore._errors import NonFiniteError, UnsupportedError
from statecore._pytree import is_traced
from statecore.generation._draw_checks import check_choices, check_shapes, check_state
from statecore.generation._sampler import Sampler, cut_settings, kept_logits
from statecore.generation._sampler_state import SamplerState

Array = jax.Array | np.ndarray


class TopLogprobs(NamedTuple):
    """The most likely tokens, likeliest first.

    tokens: `[..., N]` int32.
    logprobs: `[..., N]` float32, natural logarithms.
    """

    tokens: jax.Array
    logprobs: jax.Array


@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws:
    """What was drawn for the rows of a window.

    tokens: `[B, K]` int32; -1 where the logits offer no choice (NaN, an infinity, or nothing finite).
    mus: `[B, K]` float32, Mirostat's `mu` after each row; None without Mirostat.
    logprobs: `[B, K]` float32, of the drawn tokens under the model's own distribution, before
      penalties, bias, mask, temperature and cuts; None unless asked for.
    top: `[B, K, N]`, the likeliest tokens of that distribution; None unless asked for.
    """

    tokens: jax.Array
    mus: jax.Array | None
    logprobs: jax.Array | None
    top: TopLogprobs | None


class _Rows(NamedTuple):
    """What differs from row to row: leaves are `[K, ...]` for a sequence, and absent if not used."""

    indices: jax.Array | None
    logits: jax.Array
    counts: jax.Array | None
    allowed: jax.Array | None
    forced: jax.Array | None


def draw(
    sampler: Sampler,
    state: SamplerState,
    indices: Array,
    logits: Array,
    *,
    window: Array | None = None,
    allowed: Array | None = None,
    forced: Array | None = None,
    live: Array | None = None,
    num_logprobs: int | None = None,
) -> Draws:
    """Returns the tokens that follow `logits`; changes nothing.

    Row `k` of a window is drawn as if its drafts `1..k` had been emitted: their counts are
    added and Mirostat's `mu` has followed. So the draw of output `i` is the same whether
    its row stands alone or in a window whose drafts were right, and rows after a wrong
    draft mean nothing. It depends on the key, the sequence's row and `i` alone. Settings
    are data: a changed value never recompiles, only a feature switched on or off does.

    Args:
      sampler: the settings, checked.
      state: of the run.
      indices: `[B, K]` int, the index of each output in its sequence.
      logits: `[B, K, V]`, floating, or `[B, V]` for one row.
      window: `[B, K]` int, the tokens verified, anchor first; needed for penalties if K > 1.
      allowed: `[B, K, V]` bool, what a constraint allows; None for everything.
      forced: `[B]` int, the token that row 0 must take, -1 for none. It is drawn as the
        only candidate: Mirostat sees probability 1.
      live: `[B, K]` bool, rows whose draws will be used, for the check of `allowed`; None for all.
      num_logprobs: None for no log-probabilities, 0 for those of the drawn tokens, N to
        return the N likeliest tokens too.

    Raises:
      GeometryError: a shape does not fit the logits, a forced token is outside the
        vocabulary, or the window is missing.
      UnsupportedError: sampling without a key, a state without what the sampler counts,
        nothing allowed in a live row, a forced token that is not allowed, or `num_logprobs`
        out of range.
    """
    check_shapes(sampler, state, indices, logits, window, allowed, forced, live)
    check_state(sampler, state)
    vocab_size = logits.shape[-1]
    if num_logprobs is not None and not 0 <= num_logprobs <= vocab_size:
        raise UnsupportedError(f"num_logprobs is {num_logprobs}, but must lie between 0 and {vocab_size}, or be None.")
    if not is_traced(allowed, forced, live):
        check_choices(vocab_size, allowed, forced, live)
    return _draws(
        _settings(sampler, vocab_size),
        _bias(sampler.logit_bias, vocab_size),  # pyright: ignore[reportArgumentType]
        None if sampler.is_greedy else state.key,
        (state.counts, state.in_prompt) if sampler.uses_penalties else (None, None),
        None if sampler.mirostat is None else state.mu,
        None if sampler.is_greedy else indices,
        logits,
        window if sampler.uses_penalties and logits.ndim == 3 and logits.shape[1] > 1 else None,
        allowed,
        forced,
        num_logprobs=num_logprobs,
    )


def settings_of(sampler: Sampler, vocab_size: int) -> tuple:
    """Returns a sampler's settings as arrays, for `draw_traced`."""
    return _settings(sampler, vocab_size), _bias(sampler.logit_bias, vocab_size)  # pyright: ignore[reportArgumentType]


def draw_traced(
    settings: tuple,
    state: SamplerState,
    indices: jax.Array,
    logits: jax.Array,
    num_logprobs: int | None,
    window: jax.Array | None = None,
) -> Draws:
    """Returns what `draw` does for rows `[B, V]` or `[B, K, V]`, inside a trace, where nothing can be checked.

    Args:
      settings: from `settings_of`.
      state: of the run; without a key for a greedy sampler.
      indices: `[B, K]` int32.
      logits: `[B, K, V]`, or `[B, V]` for one row.
      num_logprobs: as for `draw`.
      window: `[B, K]`, if there is more than one row.
    """
    counted = state.counts, state.in_prompt
    at = None if state.key is None else indices
    return _draws(*settings, state.key, counted, state.mu, at, logits, window, None, None, num_logprobs=num_logprobs)


def drawn_tokens(draws: Draws, live: np.ndarray | None = None) -> np.ndarray:
    """Returns the tokens on the host, `[B, K]` int32.

    Raises:
      NonFiniteError: a live row's logits hold NaN, an infinity or nothing finite, so that no choice can be right.
    """
    tokens = np.array(draws.tokens)
    wrong = tokens < 0
    if draws.logprobs is not None:
        wrong |= np.isnan(np.array(draws.logprobs))  # of a forced token, say
    wrong = wrong if live is None else wrong & live
    if wrong.any():
        row, index = np.argwhere(wrong)[0]
        raise NonFiniteError(
            f"The logits of sequence {row}, window row {index}, hold NaN or an infinity, or nothing finite where the "
            "constraint allows a token, so no token can be chosen. Did the model overflow?"
        )
    return tokens


def top_logprobs(logits: Array, num_tokens: int) -> TopLogprobs:
    """Returns the `num_tokens` likeliest tokens of logits `[..., V]`, of the model's own distribution in float32.

    Raises:
      UnsupportedError: there are not that many tokens.
    """
    if not 1 <= num_tokens <= logits.shape[-1]:
        raise UnsupportedError(f"{num_tokens} tokens were asked for, but must lie between 1 and {logits.shape[-1]}.")
    return _top_logprobs(logits, num_tokens)


@functools.partial(jax.jit, static_argnums=1)
def _top_logprobs(logits: jax.Array, num_tokens: int) -> TopLogprobs:
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)), num_tokens)
    return TopLogprobs(tokens.astype(jnp.int32), logprobs)


# Settings as data.


@functools.lru_cache(maxsize=256)
def _settings(sampler: Sampler, vocab_size: int) -> np.ndarray | None:
    """Returns the cuts `[4]`, penalties `[3]` and Mirostat's two as float32 `[9]`; None if none has a say."""
    if sampler.is_greedy and not sampler.uses_penalties:
        return None
    penalties = (sampler.repetition_penalty, sampler.presence_penalty, sampler.frequency_penalty)
    mirostat = (0.0, 0.0) if sampler.mirostat is None else (sampler.mirostat.tau, sampler.mirostat.eta)
    return np.concatenate([cut_settings(sampler, vocab_size), np.array(penalties + mirostat, np.float32)])


@functools.lru_cache(maxsize=256)
def _bias(pairs: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns tokens and biases, padded to a power of two so that few sizes compile."""
    if not pairs:
        return None
    padding = (1 << (len(pairs) - 1).bit_length()) - len(pairs)
    tokens = [token for token, _ in pairs] + [vocab_size] * padding  # past the end: dropped
    return np.array(tokens, np.int32), np.array([bias for _, bias in pairs] + [0.0] * padding, np.float32)


# On the device.


@functools.partial(jax.jit, static_argnames="num_logprobs")
def _draws(settings, bias, key, counted, mu, indices, logits, window, allowed, forced, *, num_logprobs) -> Draws:
    counts, in_prompt = counted
    if logits.ndim == 2:
        logits = logits[:, None]  # here, since outside a jit it would be a call of its own
    rows = rows_of(logits, counts, window, allowed)._replace(
        indices=None if indices is None else jnp.asarray(indices),
        forced=None if forced is None else _first_row(forced, logits.shape[1]),
    )

    def sequence(row, in_prompt, mu, rows: _Rows):
        row_key = None if key is None else jax.random.fold_in(key, row)

        def one(mu, at: _Rows):
            return _draw_row(settings, bias, row_key, in_prompt, mu, at)

        if mu is None:
            return jax.vmap(lambda at: one(None, at)[1])(rows)
        return jax.lax.scan(one, mu, rows)[1]

    tokens, mus = jax.vmap(sequence)(jnp.arange(logits.shape[0]), in_prompt, mu, rows)
    return with_logprobs(tokens, mus, logits, num_logprobs)


def rows_of(logits, counts, window, allowed) -> _Rows:
    """Returns the rows of a window of logits `[B, K, V]`, each as if the drafts before it had been emitted."""
    counted = None if counts is None else _window_counts(counts, window, logits.shape[1])
    return _Rows(indices=None, logits=logits, counts=counted, allowed=allowed, forced=None)


def with_logprobs(tokens: jax.Array, mus: jax.Array | None, logits: jax.Array, num_logprobs: int | None) -> Draws:
    """Returns tokens `[B, K]` as draws, with the log-probabilities asked for of logits `[B, K, V]`."""
    logprobs, top = _logprobs(logits, tokens, num_logprobs)
    return Draws(tokens=tokens, mus=mus, logprobs=logprobs, top=top)


def _window_counts(counts: jax.Array, window: jax.Array | None, width: int) -> jax.Array:
    """Returns how often each token stands in the output before each row, `[B, K, V]`."""
    if window is None:
        return counts[:, None]
    vocab_size = counts.shape[-1]
    steps = jnp.arange(width)

    def before(counts, tokens, row):
        # The anchor, column 0, is emitted and counted already. What does not count goes past the end.
        counted = (steps >= 1) & (steps <= row) & (tokens >= 0)
        return counts.at[jnp.where(counted, tokens, vocab_size)].add(1, mode="drop")

    along = jax.vmap(before, in_axes=(None, None, 0))
    return jax.vmap(along, in_axes=(0, 0, None))(counts, jnp.asarray(window), steps)


def _first_row(forced: jax.Array, width: int) -> jax.Array:
    """Returns `[B, K]`: the forced token in row 0, and -1 after it."""
    return jnp.where(jnp.arange(width) == 0, jnp.asarray(forced)[:, None], -1)


def _draw_row(settings, bias, key, in_prompt, mu, at: _Rows):
    """Returns `mu` after one row, and the row's token and `mu`."""
    scores = scores_of(settings, bias, in_prompt, at)
    if key is None or at.indices is None:
        token = jnp.argmax(scores, axis=-1)
        best = scores[token]
    else:
        kept = kept_logits(scores, settings[:4], mu)
        token = jax.random.categorical(jax.random.fold_in(key, at.indices), kept)
        best = jnp.max(scores.astype(jnp.float32) / settings[0])
        mu = None if mu is None else _followed(mu, kept, token, settings[7:])
    # argmax of NaN is a valid index: it must not pass for a choice.
    token = jnp.where(jnp.isfinite(best), token, -1).astype(jnp.int32)
    return mu, (token, mu)


def scores_of(settings, bias, in_prompt, at: _Rows) -> jax.Array:
    """Returns the logits `[V]` after penalties, bias, mask and a forced token."""
    scores = jnp.asarray(at.logits)
    if at.counts is not None:
        scores = _penalised(scores.astype(jnp.float32), jnp.asarray(at.counts), in_prompt, settings[4:7])
    if bias is not None:
        scores = scores.astype(jnp.float32).at[bias[0]].add(bias[1], mode="drop")
    if at.allowed is not None:
        scores = jnp.where(at.allowed, scores, -jnp.inf)
    if at.forced is not None:
        # Its own logit may be minus infinity, so it gets another: alone, it has probability 1.
        only = jnp.where(jnp.arange(scores.shape[-1]) == at.forced, 0.0, -jnp.inf).astype(scores.dtype)
        scores = jnp.where(at.forced >= 0, only, scores)
    return scores


def _penalised(logits: jax.Array, counts: jax.Array, in_prompt: jax.Array, penalties: jax.Array) -> jax.Array:
    repetition, presence, frequency = penalties
    seen = in_prompt | (counts > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    # A product is selected before it is subtracted: contracted into one rounding, its bits would
    # depend on what the compiler fuses, and a window's rows would differ from rows drawn alone.
    penalty = jnp.where(counts > 0, frequency * counts.astype(jnp.float32), 0.0)
    return logits - penalty - jnp.where(counts > 0, presence, 0.0)


def _followed(mu: jax.Array, kept: jax.Array, token: jax.Array, mirostat: jax.Array) -> jax.Array:
    """Returns `mu` after a token was drawn from the kept logits `[V]`."""
    tau, eta = mirostat
    surprise = -jax.nn.log_softmax(kept)[token] / np.float32(np.log(2))
    # Selected for the reason given in `_penalised`; NaN leaves `mu` as it was.
    return mu - jnp.where(surprise >= 0, eta * (surprise - tau), 0.0)


def _logprobs(logits, tokens, num_logprobs):
    if num_logprobs is None:
        return None, None
    logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    top = _top_logprobs(logits, num_logprobs) if num_logprobs else None
    return jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0], top

"""Which drafts of a verified window are kept, and what follows them: pure functions of logits and keys.

Row `i` of a window's logits says what stands after window token `i`, so draft `i + 1` is held
against row `i`: the first draft against the anchor's row. After the accepted drafts comes one
token of the model's own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# What a draw is for. Each purpose has its own stream, or acceptance would depend on what was drafted.
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2


class Accepted(NamedTuple):
    """What a window comes to.

    num_accepted: `[B]` int32, drafts accepted; rows kept are one more.
    tokens: `[B, K]` int32, the accepted drafts and then the token after them; -1 past it, and
      there too where the logits offer no choice.
    """

    num_accepted: jax.Array
    tokens: jax.Array


def purpose_keys(key: jax.Array, indices: jax.Array, purpose: int) -> jax.Array:
    """Returns the keys `[B, K]` of one purpose.

    They depend on the sequence and the index of its output alone, never on how the window
    was cut, so that a restored run repeats itself.

    Args:
      key: of the run; folded, never consumed.
      indices: `[B, K]` int, the index of each output in its sequence.
      purpose: `DRAFT`, `ACCEPT` or `RESIDUAL`.
    """

    return _for_purpose(_place_keys(key, indices), purpose)


def place_key(key: jax.Array, row: jax.Array, index: jax.Array, purpose: int | None) -> jax.Array:
    """Returns the key of sequence `row` at output `index`; without a purpose, that of plain decoding's draw."""
    place = jax.random.fold_in(jax.random.fold_in(key, row), index)
    return place if purpose is None else jax.random.fold_in(place, purpose)


def _place_keys(key: jax.Array, indices: jax.Array) -> jax.Array:
    along = jax.vmap(lambda row, index: place_key(key, row, index, None), in_axes=(None, 0))
    return jax.vmap(along)(jnp.arange(indices.shape[0]), indices)


def _for_purpose(keys: jax.Array, purpose: int) -> jax.Array:
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)), in_axes=(0, None))(keys, purpose)


def accept_greedy(logits: jax.Array, window: jax.Array, num_valid: jax.Array) -> Accepted:
    """Returns the longest prefix of drafts that are the likeliest tokens, and the likeliest after it.

    Args:
      logits: `[B, K, V]`.
      window: `[B, K]` int, anchor first.
      num_valid: `[B]` int, rows that count, the anchor's included.
    """
    best = jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), jnp.argmax(logits, axis=-1), -1)
    return _accepted(best[:, :-1] == window[:, 1:], window, best, num_valid)


def accept_sampled(
    key: jax.Array,
    indices: jax.Array,
    logits: jax.Array,
    window: jax.Array,
    num_valid: jax.Array,
    draft_probs: jax.Array | None = None,
) -> Accepted:
    """Speculative sampling: the output is distributed as the model's own draws (arXiv 2211.17192, 2302.01318).

    Draft `x` of probability `q(x)` is accepted with probability `min(1, p(x) / q(x))`; the token after
    the accepted ones is drawn from `max(p - q, 0)`, or from `p` where all were accepted.

    Args:
      key: of the run.
      indices: `[B, K]` int, the index of the output that each row gives.
      logits: `[B, K, V]`, of what is to be sampled: after temperature and cuts, minus infinity for what is dropped.
      window: `[B, K]` int, anchor first.
      num_valid: `[B]` int, rows that count.
      draft_probs: `[B, K - 1, V]`, what each draft was drawn from; None for drafts that were certain.
    """
    target = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    drafts, vocab_size = window[:, 1:], logits.shape[-1]
    drawn_from = jax.nn.one_hot(drafts, vocab_size) if draft_probs is None else draft_probs
    # A row without a draft has nothing to take away, so that its residual is the model's own distribution.
    has_draft = jnp.arange(1, window.shape[1]) < num_valid[:, None]
    drawn_from = jnp.where(has_draft[..., None], drawn_from, 0.0)
    drawn_from = jnp.concatenate([drawn_from, jnp.zeros_like(target[:, :1])], axis=1)
    keys = _place_keys(key, indices)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(_for_purpose(keys, ACCEPT))
    is_right = uniform[:, :-1] * _at(drawn_from[:, :-1], drafts) < _at(target[:, :-1], drafts)
    own = _draw(_for_purpose(keys, RESIDUAL), residual(target, drawn_from))
    return _accepted(is_right, window, own, num_valid)


def accept_typical(
    key: jax.Array,
    indices: jax.Array,
    logits: jax.Array,
    window: jax.Array,
    num_valid: jax.Array,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Accepted:
    """Typical acceptance (arXiv 2401.10774): NOT lossless, the output is not distributed as the model's own draws.

    A draft is accepted if `p(x) > min(epsilon, delta * exp(-H(p)))`, `H` being the entropy in nats: where the
    model is unsure, likely tokens pass. The token after the accepted ones is drawn from `p`.

    Args:
      key, indices, logits, window, num_valid: as for `accept_sampled`.
      epsilon: the probability that always passes.
      delta: how much of `exp(-H)` passes.
    """
    target = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    entropy = -jnp.sum(jax.scipy.special.xlogy(target, target), axis=-1)
    least = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    own = _draw(purpose_keys(key, indices, RESIDUAL), target)
    return _accepted(_at(target[:, :-1], window[:, 1:]) > least[:, :-1], window, own, num_valid)


def residual(target: jax.Array, drawn_from: jax.Array) -> jax.Array:
    """Returns what is left of `target` `[..., V]` after a draft from `drawn_from` was rejected, not normalized."""
    left = jnp.maximum(target - drawn_from, 0.0)
    # Equal but for rounding: then a rejection is rounding too.
    return jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, target)


def _at(probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the probability of each token; 0 for one outside the vocabulary."""
    found = jnp.take_along_axis(probs, jnp.clip(tokens, 0, probs.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    return jnp.where((tokens >= 0) & (tokens < probs.shape[-1]), found, 0.0)


def _draw(keys: jax.Array, probs: jax.Array) -> jax.Array:
    """Returns tokens `[B, K]` drawn from probabilities `[B, K, V]`; -1 where they are none."""
    drawn = jax.vmap(jax.vmap(jax.random.categorical))(keys, jnp.log(probs))
    total = jnp.sum(probs, axis=-1)
    return jnp.where(jnp.isfinite(total) & (total > 0), drawn, -1)


def _accepted(is_right: jax.Array, window: jax.Array, own: jax.Array, num_valid: jax.Array) -> Accepted:
    """Returns drafts up to the first that is not right, and the model's `own` `[B, K]` token of the row after them."""
    is_right &= jnp.arange(1, window.shape[1]) < num_valid[:, None]
    num_accepted = jnp.cumprod(is_right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    drafts = jnp.concatenate([window[:, 1:], jnp.full_like(window[:, :1], -1)], axis=1)
    place, last = jnp.arange(window.shape[1]), num_accepted[:, None]
    tokens = jnp.where(place < last, drafts, jnp.where(place == last, own, -1))
    return Accepted(num_accepted, tokens.astype(jnp.int32))

"""The scalar-decay recurrence `h' = a h + x B^T` in the three forms we need.

`advance` is the recurrence itself, one token at a time. `ssd` is the parallel form over
chunks (Mamba-2, arXiv 2405.21060), used to train and to read prompts. `window_outputs`
reads the outputs of a short window and leaves the state alone.
All three take the log of the decay, so that decays of a stretch are differences.
"""

import jax
import jax.numpy as jnp


def advance(hidden: jax.Array, log_decay: jax.Array, x: jax.Array, b: jax.Array, keep: jax.Array) -> jax.Array:
    """Returns `hidden` after one token, in the rows where `keep` is true.

    What the other rows' inputs hold does not matter, NaN included: the mask selects, it
    does not multiply.

    Args:
      hidden: `[..., H, P, N]` float32.
      log_decay: `[..., H]`.
      x: `[..., H, P]`, already scaled by the step size.
      b: `[..., H, N]`.
      keep: `[...]` bool.
    """
    decayed = hidden * jnp.exp(log_decay)[..., None, None]
    update = x[..., :, None] * b[..., None, :]
    return jnp.where(keep[..., None, None, None], decayed + update, hidden)


def _segment_decay(total: jax.Array) -> jax.Array:
    """Returns `exp(total_t - total_s)` for `s <= t`, else 0: `[..., T, H]` to `[..., H, T, T]`."""
    total = jnp.moveaxis(total, -1, -2)
    length = total.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    # Masked before the exponential: above the diagonal the difference overflows.
    difference = jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf)
    return jnp.exp(difference)


def window_outputs(hidden: jax.Array, log_decay: jax.Array, x: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Returns the outputs `[..., T, H, P]` of `T` tokens read from `hidden`.

    Args:
      hidden: `[..., H, P, N]`, the state before the window.
      log_decay: `[..., T, H]`.
      x: `[..., T, H, P]`.
      b: `[..., T, H, N]`.
      c: `[..., T, H, N]`.
    """
    total = jnp.cumsum(log_decay, axis=-2)
    scores = jnp.einsum("...thn,...shn->...hts", c, b) * _segment_decay(total)
    inside = jnp.einsum("...hts,...shp->...thp", scores, x)
    before = jnp.einsum("...thn,...hpn->...thp", c, hidden)
    return inside + before * jnp.exp(total)[..., None]


def ssd(
    hidden: jax.Array,
    log_decay: jax.Array,
    x: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the state after `T` tokens and their outputs, chunk by chunk.

    A token that must not count has `log_decay = 0` and `x = 0`.

    Args:
      hidden: `[B, H, P, N]`, the state before the first token.
      log_decay: `[B, T, H]`.
      x: `[B, T, H, P]`.
      b: `[B, T, H, N]`.
      c: `[B, T, H, N]`.
      chunk: tokens a chunk; `T` is padded up to a multiple of it.
    """
    batch, length = x.shape[:2]
    chunk = min(chunk, length)
    num_chunks = -(-length // chunk)

    def split(leaf):
        padding = [(0, 0), (0, num_chunks * chunk - length)]
        leaf = jnp.pad(leaf, padding + [(0, 0)] * (leaf.ndim - 2))
        return leaf.reshape(batch, num_chunks, chunk, *leaf.shape[2:])

    log_decay, x, b, c = map(split, (log_decay, x, b, c))
    total = jnp.cumsum(log_decay, axis=2)  # [B, C, Q, H]
    rest = jnp.exp(total[:, :, -1:] - total)
    added = jnp.einsum("bcqhp,bcqhn->bchpn", x * rest[..., None], b)

    def pass_state(carry, chunk_inputs):
        chunk_total, chunk_added = chunk_inputs
        return carry * jnp.exp(chunk_total)[..., None, None] + chunk_added, carry

    by_chunk = jnp.moveaxis(total[:, :, -1], 1, 0), jnp.moveaxis(added, 1, 0)
    hidden, before = jax.lax.scan(pass_state, hidden, by_chunk)
    outputs = window_outputs(jnp.moveaxis(before, 0, 1), log_decay, x, b, c)
    return hidden, outputs.reshape(batch, -1, *outputs.shape[3:])[:, :length]

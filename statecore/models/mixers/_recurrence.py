"""The scalar-decay recurrence `h' = a h + x B^T` in the three forms we need.

`advance` is the recurrence itself, one token at a time. `ssd` is the parallel form over
chunks (Mamba-2, arXiv 2405.21060), used to train and to read prompts. `window_outputs`
reads the outputs of a short window and leaves the state alone.
The latter two take the log of the decay, so that decays of a stretch are sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from statecore.models.mixers._layers import sum_last


def advance(hidden: jax.Array, decay: jax.Array, x: jax.Array, b: jax.Array, keep: jax.Array) -> jax.Array:
    """Returns `hidden` after one token, in the rows where `keep` is true.

    What the other rows' inputs hold does not matter, NaN included: the mask selects, it
    does not multiply. Each term is selected on its own, so that the compiler rounds a
    kept row alike whether it stands alone or in a window; -0.0 is what adds nothing,
    bit for bit.

    Args:
      hidden: `[..., H, P, N]` float32.
      decay: `[..., H]`, its exponential taken: inside a window it would round otherwise.
      x: `[..., H, P]`, already scaled by the step size.
      b: `[..., H, N]`.
      keep: `[...]` bool.
    """
    keep = keep[..., None, None, None]
    decayed = jnp.where(keep, hidden * decay[..., None, None], hidden)
    update = x[..., :, None] * b[..., None, :]
    return decayed + jnp.where(keep, update, -0.0)


def read(hidden: jax.Array, c: jax.Array) -> jax.Array:
    """Returns what one token reads, `[..., H, P]`: `hidden` `[..., H, P, N]` times `c` `[..., H, N]`.

    On a CPU as the sum of a window, which is fused with what moves the state, so that the
    state passes through memory once; a product would wait for all of it to be written.
    """
    return jax.lax.platform_dependent(hidden, c, cpu=_read_fused, default=_read_product)


def _read_product(hidden: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.einsum("...pn,...n->...p", hidden, c)


def _read_fused(hidden: jax.Array, c: jax.Array) -> jax.Array:
    return sum_last(hidden * c[..., None, :])


def decay_between(log_decay: jax.Array) -> jax.Array:
    """Returns what is left at token `t` of what token `s` added, 0 where `s > t`: `[..., T, T]` of `[..., T]`."""
    causal = np.tril(np.ones((log_decay.shape[-1],) * 2, bool))
    # Each stretch is summed on its own: in a difference of sums from the chunk's beginning
    # a strong decay before the stretch would round away a weak one inside it.
    inside = jnp.where(np.tril(causal, -1), log_decay[..., None], 0.0)
    total = jnp.matmul(causal.astype(np.float32), inside, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(causal, jnp.exp(total), 0.0)


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
    scores = jnp.einsum("...thn,...shn->...hts", c, b) * decay_between(jnp.moveaxis(log_decay, -1, -2))
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
    # What is left of each token at the chunk's end: the sum of what comes after it, its own left out.
    after = jnp.cumsum(log_decay[:, :, :0:-1], axis=2)[:, :, ::-1]
    rest = jnp.exp(jnp.pad(after, [(0, 0), (0, 0), (0, 1), (0, 0)]))
    added = jnp.einsum("bcqhp,bcqhn->bchpn", x * rest[..., None], b)

    def pass_state(carry, chunk_inputs):
        chunk_total, chunk_added = chunk_inputs
        return carry * jnp.exp(chunk_total)[..., None, None] + chunk_added, carry

    by_chunk = jnp.moveaxis(total[:, :, -1], 1, 0), jnp.moveaxis(added, 1, 0)
    hidden, before = jax.lax.scan(pass_state, hidden, by_chunk)
    outputs = window_outputs(jnp.moveaxis(before, 0, 1), log_decay, x, b, c)
    return hidden, outputs.reshape(batch, -1, *outputs.shape[3:])[:, :length]


class Drive(NamedTuple):
    """What drives the recurrence of some tokens; kept, it replays them.

    log_decay: `[..., K, H]`.
    x: `[..., K, H, P]`, scaled by the step size.
    b: `[..., K, G, N]`, each for `H / G` heads.
    """

    log_decay: jax.Array
    x: jax.Array
    b: jax.Array


def replay(hidden: jax.Array, drive: Drive, num_rows: jax.Array) -> jax.Array:
    """Returns `hidden` of all layers after `num_rows` `[B]` rows of a window.

    One pass over the state whatever the window's width: the rows are unrolled inside
    one expression, and all layers are in it.

    Args:
      hidden: `[L, B, H, P, N]`.
      drive: leaves `[L, B, K, ...]`.
      num_rows: `[B]` int32.
    """
    decay, share = jnp.exp(drive.log_decay), hidden.shape[2] // drive.b.shape[3]
    for row in range(drive.x.shape[2]):
        keep = jnp.broadcast_to(row < num_rows, hidden.shape[:2])
        b = jnp.repeat(drive.b[:, :, row], share, axis=2)
        hidden = advance(hidden, decay[:, :, row], drive.x[:, :, row], b, keep)
    return hidden

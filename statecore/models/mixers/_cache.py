"""Rows of keys and values: where a pass writes them, which it may see, and attention over those.

The caches come stacked over layers, `[L, B, S, G, D]`, and are written in place at
`layer`: taking one layer out and stacking them again would copy the whole cache.
"""

import jax
import jax.numpy as jnp

from statecore.models.mixers._mixer import Chunk

Caches = tuple[jax.Array, ...]


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """Returns `[B, T, H * D]` from the rows that are `visible` `[B, T, S]`; the others may hold anything.

    Args:
      query: `[B, T, H, D]`.
      key: `[B, S, G, D]`.
      value: `[B, S, G, E]`, where `E` may differ from `D`.
      visible: `[B, T, S]` bool.
      scale: of the scores.
    """
    batch, length, num_heads, size = query.shape
    groups = key.shape[2]
    # The heads that share keys are rows of one product for each group: [B, G, (H/G) T, D].
    query = query.reshape(batch, length, groups, -1, size).transpose(0, 2, 3, 1, 4).reshape(batch, groups, -1, size)
    scores = jnp.matmul(query, key.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32) * scale
    scores = scores.reshape(batch, groups, num_heads // groups, length, -1)
    weight = weigh(scores, visible[:, None, None]).astype(value.dtype).reshape(batch, groups, -1, key.shape[1])
    mixed = jnp.matmul(weight, hide(value, visible).transpose(0, 2, 1, 3))
    mixed = mixed.reshape(batch, groups, num_heads // groups, length, -1)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1)


def weigh(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns the softmax of `scores` `[..., T, S]` over the rows that are `visible`; the others weigh nothing."""
    scores = jnp.where(visible, scores, -jnp.inf)
    # A row with nothing to see (padding) must give numbers, not NaN.
    top = jnp.maximum(jnp.max(scores, -1, keepdims=True), jnp.finfo(scores.dtype).min)
    weight = jnp.exp(scores - top)
    return weight / jnp.maximum(jnp.sum(weight, -1, keepdims=True), 1e-30)


def hide(rows: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns `rows` `[B, S, ...]`, zero where no token sees them: `visible` is `[B, T, S]`.

    Zero times NaN is NaN: a weight of zero does not hide a row that holds one.
    """
    seen = jnp.any(visible, axis=1).reshape(*rows.shape[:2], *(1,) * (rows.ndim - 2))
    return jnp.where(seen, rows, 0)


def _write(cache: jax.Array, layer: int, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Writes `new` `[B, T, ...]` into `rows` `[B, T]`; a row past the end is dropped."""
    batch = jnp.arange(rows.shape[0])[:, None]
    return cache.at[layer, batch, rows].set(new.astype(cache.dtype), mode="drop")


def full_rows(caches: Caches, layer: int, key: jax.Array, value: jax.Array, chunk: Chunk):
    """Writes the rows that count into append planes; returns the caches, keys, values and what is visible."""
    capacity = caches[0].shape[2]
    rows = jnp.where(chunk.valid, chunk.positions, capacity)
    caches = _write(caches[0], layer, rows, key), _write(caches[1], layer, rows, value)
    seen = jnp.arange(capacity)
    visible = seen <= chunk.positions[..., None]
    visible &= seen < (chunk.position + chunk.num_valid)[:, None, None]
    return caches, caches[0][layer], caches[1][layer], visible


def _in_window(window: int, key_positions: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns which of `key_positions` `[B, S]` each of `positions` `[B, T]` may see."""
    distance = positions[:, :, None] - key_positions[:, None, :]
    known = key_positions[:, None, :] >= 0
    return known & (distance >= 0) & (distance < window)


def ring_rows(caches: Caches, layer: int, key: jax.Array, value: jax.Array, chunk: Chunk, window: int):
    """As `full_rows`, over a ring of `R` rows, for at most `R - W + 1` tokens.

    A longer chunk would overwrite rows that its first tokens still see: `ring_chunk`
    takes any length.
    """
    size = caches[0].shape[2]
    rows = jnp.where(chunk.valid, chunk.positions % size, size)
    caches = _write(caches[0], layer, rows, key), _write(caches[1], layer, rows, value)
    newest = (chunk.position + chunk.num_valid - 1)[:, None]
    held = newest - (newest - jnp.arange(size)) % size
    return caches, caches[0][layer], caches[1][layer], _in_window(window, held, chunk.positions)


def ring_chunk(caches: Caches, layer: int, key: jax.Array, value: jax.Array, chunk: Chunk, window: int):
    """As `ring_rows`, for a chunk of any length: it is read from the old rows and the new ones side by side."""
    size = caches[0].shape[2]
    past = chunk.position[:, None] + jnp.arange(1 - window, 0)
    batch = jnp.arange(past.shape[0])[:, None]
    keys, values = (
        jnp.concatenate([cache[layer][batch, past % size], new.astype(cache.dtype)], axis=1)
        for cache, new in zip(caches, (key, value), strict=True)
    )
    held = jnp.concatenate([past, jnp.where(chunk.valid, chunk.positions, -1)], axis=1)
    # Of a chunk longer than the ring only the last rows are kept: each slot once.
    kept = chunk.valid & (jnp.arange(chunk.length) >= chunk.num_valid[:, None] - size)
    rows = jnp.where(kept, chunk.positions % size, size)
    caches = _write(caches[0], layer, rows, key), _write(caches[1], layer, rows, value)
    return caches, keys, values, _in_window(window, held, chunk.positions)

"""Causal attention over a cache: all rows (`full`), or a ring of the last ones (`ring`).

State of one full layer: `key` and `value` `[B, S, G, D]`, row `p` written by the token
at position `p`. State of one sliding layer: the same with `R` rows, row `p % R`. `G`
key-value heads serve `H` query heads (grouped queries, arXiv 2305.13245).

The caches come stacked over layers, `[L, B, S, G, D]`, and are written in place at
`layer`: taking one layer out and stacking them again would copy the whole cache.
"""

import dataclasses

import jax
import jax.numpy as jnp

from statecore.models._layers import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes of one mixer. `window` is None for full attention, which has no rotation."""

    width: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_size: int  # D
    window: int | None = None  # W
    rope_base: float = 10_000.0


def _project(config: AttentionConfig, params: dict, x: jax.Array, positions: jax.Array):
    """Returns queries `[B, T, H, D]`, keys and values `[B, T, G, D]`."""
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    ends = [heads[0] * config.head_size, (heads[0] + heads[1]) * config.head_size]
    parts = jnp.split(x @ params["qkv_proj"], ends, axis=-1)
    query, key, value = (
        part.reshape(*x.shape[:2], num, config.head_size) for part, num in zip(parts, heads, strict=True)
    )
    if config.window is not None:
        query = rotate(query, positions, config.rope_base)
        key = rotate(key, positions, config.rope_base)
    return query, key, value


def _attend(config, params, query, key, value, visible):
    """Returns `[B, T, D]` from rows `visible` `[B, T, S]`; the others may hold anything."""
    batch, length = query.shape[:2]
    groups = config.num_kv_heads
    query = query.reshape(batch, length, groups, -1, config.head_size)
    scores = jnp.einsum("btghd,bsgd->bghts", query, key) * config.head_size**-0.5
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    # A row with nothing to see (padding) must give numbers, not NaN.
    top = jnp.maximum(jnp.max(scores, -1, keepdims=True), jnp.finfo(scores.dtype).min)
    weight = jnp.exp(scores - top)
    weight = weight / jnp.maximum(jnp.sum(weight, -1, keepdims=True), 1e-30)
    # Zero times NaN is NaN: a weight of zero does not hide a row that holds one.
    value = jnp.where(jnp.any(visible, axis=1)[..., None, None], value, 0.0)
    mixed = jnp.einsum("bghts,bsgd->btghd", weight, value)
    return mixed.reshape(batch, length, -1) @ params["out_proj"]


def _write(cache: jax.Array, layer: int, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Writes `new` `[B, T, G, D]` into `rows` `[B, T]`; a row past the end is dropped."""
    batch = jnp.arange(rows.shape[0])[:, None]
    return cache.at[layer, batch, rows].set(new, mode="drop")


def full(config, params, caches, layer, x, position, num_valid):
    """Writes `num_valid` rows of a full layer and attends; padding is not written.

    Args:
      config: the sizes.
      params: the layer's parameters.
      caches: keys and values, each `[L, B, S, G, D]`.
      layer: which of the `L`.
      x: `[B, T, D]` activations.
      position: `[B]` int32, rows already there.
      num_valid: `[B]` int32.

    Returns:
      the caches and the output `[B, T, D]`.
    """
    offsets = jnp.arange(x.shape[1])
    positions = position[:, None] + offsets
    query, key, value = _project(config, params, x, positions)
    capacity = caches[0].shape[2]
    rows = jnp.where(offsets < num_valid[:, None], positions, capacity)
    keys, values = _write(caches[0], layer, rows, key), _write(caches[1], layer, rows, value)
    seen = jnp.arange(capacity)
    visible = seen <= positions[..., None]
    visible &= seen < (position + num_valid)[:, None, None]
    return (keys, values), _attend(config, params, query, keys[layer], values[layer], visible)


def _in_window(config, key_positions, positions):
    """Returns which of `key_positions` `[B, S]` each of `positions` `[B, T]` may see."""
    distance = positions[:, :, None] - key_positions[:, None, :]
    known = key_positions[:, None, :] >= 0
    return known & (distance >= 0) & (distance < config.window)


def ring(config, params, caches, layer, x, position, num_valid):
    """As `full`, over a ring of `R` rows, for at most `R - W + 1` tokens.

    A longer chunk would overwrite rows that its first tokens still see: `ring_chunk`
    takes any length.
    """
    size = caches[0].shape[2]
    offsets = jnp.arange(x.shape[1])
    positions = position[:, None] + offsets
    query, key, value = _project(config, params, x, positions)
    rows = jnp.where(offsets < num_valid[:, None], positions % size, size)
    keys, values = _write(caches[0], layer, rows, key), _write(caches[1], layer, rows, value)
    newest = (position + num_valid - 1)[:, None]
    held = newest - (newest - jnp.arange(size)) % size
    visible = _in_window(config, held, positions)
    return (keys, values), _attend(config, params, query, keys[layer], values[layer], visible)


def ring_chunk(config, params, caches, layer, x, position, num_valid):
    """As `ring`, for a chunk of any length: it attends first and writes last."""
    size, length = caches[0].shape[2], x.shape[1]
    offsets = jnp.arange(length)
    positions = position[:, None] + offsets
    query, key, value = _project(config, params, x, positions)
    past = position[:, None] + jnp.arange(1 - config.window, 0)
    batch = jnp.arange(x.shape[0])[:, None]
    key_seen, value_seen = (
        jnp.concatenate([cache[layer][batch, past % size], new], axis=1)
        for cache, new in zip(caches, (key, value), strict=True)
    )
    valid = offsets < num_valid[:, None]
    held = jnp.concatenate([past, jnp.where(valid, positions, -1)], axis=1)
    output = _attend(config, params, query, key_seen, value_seen, _in_window(config, held, positions))
    # Of a chunk longer than the ring only the last rows are kept: each slot once.
    kept = valid & (offsets >= num_valid[:, None] - size)
    rows = jnp.where(kept, positions % size, size)
    keys, values = _write(caches[0], layer, rows, key), _write(caches[1], layer, rows, value)
    return (keys, values), output

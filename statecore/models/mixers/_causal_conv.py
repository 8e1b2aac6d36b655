"""The causal depthwise convolution before a recurrence, or instead of one, and its shift register.

State: the last `C - 1` inputs, before they are convolved, oldest first: `[B, C-1, F]`.
A sequence that is shorter has zeros before its first token.
"""

import jax
import jax.numpy as jnp

from statecore.models.mixers._mixer import Arrays, Chunk


def convolve(params: Arrays, past: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the convolution `[B, T, F]` over `past` `[B, C-1, F]` then `new` `[B, T, F]`.

    Parameters: `conv_weight` `[C, F]`, and `conv_bias` `[F]` if there is one.
    """
    taps, length = params["conv_weight"], new.shape[1]
    both = jnp.concatenate([past.astype(new.dtype), new], axis=1)
    out = both[:, :length] * taps[0]
    for i in range(1, taps.shape[0]):
        out = out + both[:, i : i + length] * taps[i]
    return out + params["conv_bias"] if "conv_bias" in params else out


def shift_in(past: jax.Array, new: jax.Array, num_rows: jax.Array) -> jax.Array:
    """Returns the last `C - 1` inputs after `num_rows` `[B]` rows of `new` `[B, T, F]`."""
    both = jnp.concatenate([past, new.astype(past.dtype)], axis=1)
    size = past.shape[1]
    return jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, size))(both, num_rows)


def shift_layers(past: jax.Array, new: jax.Array, num_rows: jax.Array) -> jax.Array:
    """As `shift_in`, for all layers: `past` `[L, B, C-1, F]`, `new` `[L, B, K, F]`."""
    return jax.vmap(shift_in, in_axes=(0, 0, None))(past, new, num_rows)


def advanced(past: jax.Array, new: jax.Array, chunk: Chunk) -> jax.Array:
    """Returns the shift register after the rows of a chunk that count."""
    if chunk.mode == "step":
        return jnp.concatenate([past[:, 1:], new.astype(past.dtype)], axis=1)
    return shift_in(past, new, chunk.num_valid)

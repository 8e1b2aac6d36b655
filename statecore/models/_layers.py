"""Small pure layers that every mixer shares: norms, rotary positions, MLP."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Returns `x` `[..., D]` divided by its root mean square, times `weight` `[D]`."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * weight


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Returns `x` `[B, T, H, D]` rotated by `positions` `[B, T]` (half-split RoPE).

    Source: RoFormer (arXiv 2104.09864); `base` is its theta.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency  # [B, T, D/2]
    sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def swiglu(params: dict, x: jax.Array) -> jax.Array:
    """Returns the gated MLP of `x` `[..., D]` (arXiv 2002.05202)."""
    gate, up = jnp.split(x @ params["gate_up"], 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ params["down"]

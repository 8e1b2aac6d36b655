"""Rotary positions (RoFormer, arXiv 2104.09864), half split, and how their frequencies are scaled."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of one kind of layer.

    dim: leading dimensions of a head that are rotated; the rest is left alone.
    base: theta.
    scaling: `default`, `linear` (positions over `factor`), or `llama3` (low frequencies
      over `factor`, high ones kept, a ramp between them).
    """

    dim: int
    base: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def frequencies(self) -> np.ndarray:
        """Returns the angle a position, `[dim / 2]` float32."""
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        plain = (1.0 / np.float32(self.base) ** exponent).astype(np.float32)
        if self.scaling == "linear":
            return plain / np.float32(self.factor)
        return self._ramped(plain) if self.scaling == "llama3" else plain

    def _ramped(self, plain: np.ndarray) -> np.ndarray:
        """Returns frequencies as Llama 3.1 scales them: by how often they turn in the original length."""
        turns = self.original_length * plain / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * plain / self.factor + smooth * plain).astype(np.float32)

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns `x` `[B, T, H, D]` rotated by `positions` `[B, T]`, in float32 inside."""
        angle = positions[..., None].astype(jnp.float32) * self.frequencies()
        sin, cos = (wave(angle)[:, :, None].astype(x.dtype) for wave in (jnp.sin, jnp.cos))
        half = self.dim // 2
        left, right, rest = x[..., :half], x[..., half : self.dim], x[..., self.dim :]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)

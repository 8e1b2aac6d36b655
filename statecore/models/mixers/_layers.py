"""Small pure layers that every mixer shares: norms, activations, matrix products."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """A root-mean-square norm (arXiv 1910.07467), computed in float32.

    eps: added to the mean square.
    offset: added to the weight: 1 for the families that store `w` and mean `1 + w`, which
      also multiply it in float32; the others cast back first.
    is_float32: whether a weight without an offset is multiplied in float32 too (Nemotron-H).
    """

    eps: float = 1e-5
    offset: float = 0.0
    is_float32: bool = False

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns `x` `[..., D]` over its root mean square, times the weight `[D]`."""
        scaled = unit_rms(x.astype(jnp.float32), self.eps)
        if not self.offset and not self.is_float32:
            return weight * scaled.astype(x.dtype)
        return (scaled * (self.offset + weight.astype(jnp.float32))).astype(x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """Returns `x` `[..., D]` over its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def linear(params: dict, name: str, x: jax.Array) -> jax.Array:
    """Returns `x` `[..., D]` times the matrix `name` `[D, F]`, plus `name_bias` `[F]` if there is one."""
    out = x @ params[name]
    return out + params[f"{name}_bias"] if f"{name}_bias" in params else out


def sum_last(x: jax.Array) -> jax.Array:
    """Returns the sum over the last axis, as that of a window: on a CPU it is fused with what makes `x`, and fast."""
    window = (1,) * (x.ndim - 1) + x.shape[-1:]
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID")[..., 0]


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns GELU by its tanh form, as Gemma has it (arXiv 1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


def relu_squared(x: jax.Array) -> jax.Array:
    """Returns the square of the positive part (arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu2": relu_squared,
}

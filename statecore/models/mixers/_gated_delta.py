"""The gated delta net (arXiv 2412.06464), as Qwen3-Next has it: a causal convolution and the gated delta rule.

State of one layer: the last `C - 1` inputs of the convolution (`conv`, `[B, C-1, F]`), and
the matrices `hidden` `[B, H, K, V]` in float32, from keys to values. `F` is `2 G K + H V`:
queries, keys and values side by side, where each of `G` key heads serves `H / G`
consecutive value heads.
"""

import dataclasses

import jax
import jax.numpy as jnp

from statecore.models.mixers._causal_conv import advanced, convolve, shift_layers
from statecore.models.mixers._delta_rule import Tokens, chunked, counted, step, window
from statecore.models.mixers._layers import Norm, linear
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec
from statecore.models.mixers._recurrence import Drive, replay

# Added to the square of a query's or a key's length.
_LENGTH_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net.

    Parameters: `in_proj` `[D, F + H V + 2 H]` (conv input, output gate, betas, step sizes),
    `conv_weight` `[C, F]`, `dt_bias` and `a_log` `[H]`, `norm` `[V]`, `out_proj` `[H V, D]`.

    chunk: tokens that a long pass takes at once.
    eps: of the norm of each head's output.
    """

    width: int
    num_key_heads: int  # G
    num_value_heads: int  # H
    key_size: int  # K
    value_size: int  # V
    num_taps: int = 4  # C
    chunk: int = 32
    eps: float = 1e-6

    @property
    def inner(self) -> int:
        """`H * V`."""
        return self.num_value_heads * self.value_size

    @property
    def conv_width(self) -> int:
        """`F`."""
        return 2 * self.num_key_heads * self.key_size + self.inner

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        heads = (self.num_value_heads,)
        return {
            "in_proj": Param(shape=(self.width, self.conv_width + self.inner + 2 * self.num_value_heads)),
            "conv_weight": Param(shape=(self.num_taps, self.conv_width)),
            "dt_bias": Param(shape=heads, init="step_size"),
            "a_log": Param(shape=heads, init="log_range"),
            "norm": Param(shape=(self.value_size,), init="ones"),
            "out_proj": Param(shape=(self.inner, self.width), init="residual"),
        }

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """The convolution's last inputs, and the matrices of the delta rule."""
        hidden = self.num_value_heads, self.key_size, self.value_size
        return {
            "conv": PlaneSpec(kind="shift", shape=(self.conv_width,), rows=self.num_taps - 1),
            "hidden": PlaneSpec(kind="recurrent", shape=hidden, is_float32=True),
        }

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]`, the planes and the trace; see `Mixer`."""
        del index
        inner = self.conv_width + self.inner
        ends = [self.conv_width, inner, inner + self.num_value_heads]
        conv_input, gate, beta, step_size = jnp.split(linear(params, "in_proj", x), ends, axis=-1)
        conv = jax.nn.silu(convolve(params, planes["conv"], conv_input))
        tokens = self._tokens(params, conv, beta, step_size)
        if chunk.mode == "verify":
            tokens = counted(tokens, chunk.valid)
            update, outputs = window(planes["hidden"], tokens)
            kept = {"log_decay": tokens.log_decay, "key": tokens.key[:, :, :: self._share], "update": update}
            return self._finish(params, outputs, gate), {}, kept | {"conv_input": conv_input}
        hidden, outputs = self._advanced(planes["hidden"], tokens, chunk)
        moved = {"conv": advanced(planes["conv"], conv_input, chunk), "hidden": hidden}
        return self._finish(params, outputs, gate), moved, {}

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Returns both planes `[L, B, ...]` after `num_rows` `[B]` rows; see `Mixer`."""
        conv = shift_layers(planes["conv"], trace["conv_input"], num_rows)
        key = jnp.repeat(trace["key"], self._share, axis=3)
        drive = Drive(trace["log_decay"], key, trace["update"])
        return {"conv": conv, "hidden": replay(planes["hidden"], drive, num_rows)}

    @property
    def _share(self) -> int:
        """Value heads that one key head serves."""
        return self.num_value_heads // self.num_key_heads

    def _tokens(self, params: Arrays, conv: jax.Array, beta: jax.Array, step_size: jax.Array) -> Tokens:
        """Returns what drives the recurrence, from `[B, T, F]`, `[B, T, H]` and `[B, T, H]`."""
        keys = self.num_key_heads * self.key_size
        query, key, value = jnp.split(conv.astype(jnp.float32), [keys, 2 * keys], axis=-1)
        query, key = (self._heads(_unit(part.reshape(*part.shape[:2], -1, self.key_size))) for part in (query, key))
        step_size = jax.nn.softplus(step_size.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32))
        return Tokens(
            query=query * self.key_size**-0.5,
            key=key,
            value=value.reshape(*value.shape[:2], -1, self.value_size),
            log_decay=-step_size * jnp.exp(params["a_log"].astype(jnp.float32)),
            beta=jax.nn.sigmoid(beta).astype(jnp.float32),
        )

    def _heads(self, leaf: jax.Array) -> jax.Array:
        """Returns `[B, T, G, K]` as every value head sees it: `[B, T, H, K]`."""
        return jnp.repeat(leaf, self._share, axis=2)

    def _advanced(self, hidden: jax.Array, tokens: Tokens, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Returns the matrices after the rows that count, and the outputs `[B, T, H, V]`."""
        if chunk.mode == "step":
            one = Tokens(*(leaf[:, 0] for leaf in tokens))
            hidden, outputs = step(hidden, one, chunk.num_valid > 0)
            return hidden, outputs[:, None]
        return chunked(hidden, counted(tokens, chunk.valid), chunk=self.chunk)

    def _finish(self, params: Arrays, outputs: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns the mixer's output `[B, T, D]`: each head normed, then the gate, then the product."""
        normed = Norm(eps=self.eps)(outputs.astype(gate.dtype), params["norm"])
        opened = jax.nn.silu(gate.astype(jnp.float32))
        gated = normed.reshape(gate.shape).astype(jnp.float32) * opened
        return linear(params, "out_proj", gated.astype(gate.dtype))


def _unit(x: jax.Array) -> jax.Array:
    """Returns `x` `[..., K]` over its length."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _LENGTH_EPS)

"""The Mamba-2 mixer (arXiv 2405.21060): a causal convolution and a scalar-decay SSM.

State of one layer: the last `C - 1` inputs of the convolution (`conv`, `[B, C-1, F]`),
and the SSM's `hidden` `[B, H, P, N]` in float32. `F` is `H * P + 2 * G * N`: x, B and C
side by side, where `G` groups share one B and one C each.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from statecore.models.mixers._causal_conv import advanced, convolve, shift_layers
from statecore.models.mixers._layers import linear, unit_rms
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec
from statecore.models.mixers._recurrence import Drive, advance, read, replay, ssd, window_outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A Mamba-2 mixer.

    Parameters: `in_proj` `[D, H P + F + H]` (gate, conv input, step sizes), `conv_weight`
    `[C, F]`, `conv_bias` `[F]`, `dt_bias`, `a_log` and `skip` `[H]`, `norm` `[H P]`,
    `out_proj` `[H P, D]`, and the biases of the two products.

    num_groups: `G`; heads of one group share B and C, and are normed together.
    chunk: tokens that a long pass takes at once.
    step_limit: what step sizes are clamped to.
    norm: the gated norm: `gate_first` (Mamba-2), `norm_first`, or None for a gate alone.
    scales: of gate, x, B, C and step sizes, as they leave `in_proj` (Falcon-H1).
    in_scale, out_scale: of the mixer's input and output.
    """

    width: int
    num_heads: int  # H
    head_size: int  # P
    state_size: int  # N
    num_groups: int = 1  # G
    num_taps: int = 4  # C
    chunk: int = 32
    eps: float = 1e-5
    step_limit: tuple[float, float] = (0.0, float("inf"))
    norm: str | None = "gate_first"
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    scales: tuple[float, ...] | None = None
    in_scale: float = 1.0
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """`H * P`."""
        return self.num_heads * self.head_size

    @property
    def conv_width(self) -> int:
        """`F`."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        columns, heads = self.inner + self.conv_width + self.num_heads, (self.num_heads,)
        shapes = {
            "in_proj": Param(shape=(self.width, columns)),
            "conv_weight": Param(shape=(self.num_taps, self.conv_width)),
            "dt_bias": Param(shape=heads, init="step_size"),
            "a_log": Param(shape=heads, init="log_range"),
            "skip": Param(shape=heads, init="ones"),
            "out_proj": Param(shape=(self.inner, self.width), init="residual"),
        }
        if self.has_conv_bias:
            shapes["conv_bias"] = Param(shape=(self.conv_width,), init="zeros")
        if self.norm is not None:
            shapes["norm"] = Param(shape=(self.inner,), init="ones")
        if self.has_in_bias:
            shapes["in_proj_bias"] = Param(shape=(columns,), init="zeros")
        if self.has_out_bias:
            shapes["out_proj_bias"] = Param(shape=(self.width,), init="zeros")
        return shapes

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """The convolution's last inputs, and the SSM's state."""
        hidden = self.num_heads, self.head_size, self.state_size
        return {
            "conv": PlaneSpec(kind="shift", shape=(self.conv_width,), rows=self.num_taps - 1),
            "hidden": PlaneSpec(kind="recurrent", shape=hidden, is_float32=True),
        }

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]`, the planes and the trace; see `Mixer`."""
        del index
        gate, conv_input, step_size = self._project(params, x)
        conv = jax.nn.silu(convolve(params, planes["conv"], conv_input))
        drive, c, skip = self._drive(params, conv, step_size)
        if chunk.mode == "verify":
            outputs = window_outputs(planes["hidden"], drive.log_decay, drive.x, self._heads(drive.b), c)
            kept = drive._asdict() | {"conv_input": conv_input}
            return self._finish(params, outputs + skip, gate, x.dtype), {}, kept
        hidden, outputs = self._advanced(planes["hidden"], drive, c, chunk)
        moved = {"conv": advanced(planes["conv"], conv_input, chunk), "hidden": hidden}
        return self._finish(params, outputs + skip, gate, x.dtype), moved, {}

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Returns both planes `[L, B, ...]` after `num_rows` `[B]` rows; see `Mixer`."""
        conv = shift_layers(planes["conv"], trace["conv_input"], num_rows)
        drive = Drive(trace["log_decay"], trace["x"], trace["b"])
        return {"conv": conv, "hidden": replay(planes["hidden"], drive, num_rows)}

    def _project(self, params: Arrays, x: jax.Array):
        """Returns gate `[B, T, H P]`, conv input `[B, T, F]` and step size `[B, T, H]` in float32."""
        x = x * self.in_scale if self.in_scale != 1.0 else x
        projected = linear(params, "in_proj", x)
        if self.scales is not None:
            group = self.num_groups * self.state_size
            widths = self.inner, self.inner, group, group, self.num_heads
            projected = projected * np.repeat(np.array(self.scales, np.float32), widths).astype(projected.dtype)
        gate, conv_input, step_size = jnp.split(projected, [self.inner, self.inner + self.conv_width], axis=-1)
        step_size = jax.nn.softplus(step_size.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32))
        return gate, conv_input, jnp.clip(step_size, *self.step_limit)

    def _drive(self, params: Arrays, conv: jax.Array, step_size: jax.Array):
        """Returns what drives the recurrence, its read-out `c` `[B, T, H, N]` and the skip; all in float32."""
        group = self.num_groups * self.state_size
        x, b, c = jnp.split(conv.astype(jnp.float32), [self.inner, self.inner + group], axis=-1)
        x = x.reshape(*x.shape[:2], self.num_heads, self.head_size)
        b, c = (part.reshape(*x.shape[:2], self.num_groups, self.state_size) for part in (b, c))
        log_decay = -step_size * jnp.exp(params["a_log"].astype(jnp.float32))
        skip = x * params["skip"].astype(jnp.float32)[:, None]
        return Drive(log_decay, x * step_size[..., None], b), self._heads(c), skip

    def _heads(self, leaf: jax.Array) -> jax.Array:
        """Returns `[B, T, G, N]` as every head sees it: `[B, T, H, N]`."""
        return jnp.repeat(leaf, self.num_heads // self.num_groups, axis=2)

    def _advanced(self, hidden: jax.Array, drive: Drive, c: jax.Array, chunk: Chunk):
        """Returns the SSM's state after the rows that count, and the outputs `[B, T, H, P]`."""
        log_decay, x, b = drive.log_decay, drive.x, self._heads(drive.b)
        if chunk.mode == "step":
            hidden = advance(hidden, jnp.exp(log_decay[:, 0]), x[:, 0], b[:, 0], chunk.num_valid > 0)
            return hidden, read(hidden, c[:, 0])[:, None]
        valid = chunk.valid[..., None]
        # Selected, not multiplied: a row that does not count may hold NaN.
        log_decay, x, b = (
            jnp.where(valid, log_decay, 0.0),
            jnp.where(valid[..., None], x, 0.0),
            jnp.where(valid[..., None], b, 0.0),
        )
        return ssd(hidden, log_decay, x, b, c, chunk=self.chunk)

    def _finish(self, params: Arrays, outputs: jax.Array, gate: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns the mixer's output `[B, T, D]`: gate and norm in their order, then the product."""
        flat = outputs.reshape(*outputs.shape[:2], -1)
        opened = jax.nn.silu(gate.astype(jnp.float32))
        if self.norm == "gate_first":
            flat = self._normed(params, flat * opened)
        elif self.norm == "norm_first":
            flat = self._normed(params, flat) * opened
        else:
            flat = flat * opened
        out = linear(params, "out_proj", flat.astype(dtype))
        return out * self.out_scale if self.out_scale != 1.0 else out

    def _normed(self, params: Arrays, flat: jax.Array) -> jax.Array:
        """Returns `flat` `[B, T, H P]`, normed group by group."""
        grouped = flat.reshape(*flat.shape[:2], self.num_groups, -1)
        return unit_rms(grouped, self.eps).reshape(flat.shape) * params["norm"].astype(jnp.float32)

"""The Mamba-2 mixer (arXiv 2405.21060): a causal convolution and a scalar-decay SSM.

State of one layer: the last `C - 1` inputs of the convolution, before it is applied
(`conv`, `[B, C-1, F]`), and the SSM's `hidden` `[B, H, P, N]` in float32. `F` is
`H * P + 2 * N`: x, B and C side by side, one group.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from statecore.models._layers import rms_norm
from statecore.models._recurrence import advance, ssd, window_outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of one mixer; see the legend of letters in `statecore._typing`."""

    width: int
    num_heads: int  # H
    head_size: int  # P
    state_size: int  # N
    num_taps: int = 4  # C
    chunk: int = 32

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_size

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.state_size


class Drive(NamedTuple):
    """What drives the recurrence of some tokens; kept, it replays them.

    log_decay: `[B, T, H]`.
    x: `[B, T, H, P]`, scaled by the step size.
    b: `[B, T, N]`.
    """

    log_decay: jax.Array
    x: jax.Array
    b: jax.Array


def _project(config: Mamba2Config, params: dict, x: jax.Array):
    """Returns gate `[B, T, H*P]`, conv input `[B, T, F]` and step size `[B, T, H]`."""
    splits = [config.inner, config.inner + config.conv_width]
    gate, conv_input, step_size = jnp.split(x @ params["in_proj"], splits, axis=-1)
    return gate, conv_input, jax.nn.softplus(step_size + params["dt_bias"])


def _convolve(params: dict, past: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the convolution `[B, T, F]` over `past` `[B, C-1, F]` then `new` `[B, T, F]`."""
    taps, length = params["conv_weight"], new.shape[1]  # [C, F]
    both = jnp.concatenate([past, new], axis=1)
    shifted = [both[:, i : i + length] * taps[i] for i in range(taps.shape[0])]
    return jax.nn.silu(sum(shifted) + params["conv_bias"])


def _drive(config: Mamba2Config, params: dict, conv: jax.Array, step_size: jax.Array):
    """Returns the recurrence's drive, its read-out `c` `[B, T, N]` and the skip."""
    splits = [config.inner, config.inner + config.state_size]
    x, b, c = jnp.split(conv, splits, axis=-1)
    x = x.reshape(*x.shape[:2], config.num_heads, config.head_size)
    log_decay = -step_size * jnp.exp(params["a_log"])
    skip = x * params["skip"][:, None]
    return Drive(log_decay, x * step_size[..., None], b), c, skip


def _finish(params: dict, outputs: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns the mixer's output `[B, T, D]`: gate, norm, project (the gate first)."""
    flat = outputs.reshape(*outputs.shape[:2], -1)
    return rms_norm(flat * jax.nn.silu(gate), params["norm"]) @ params["out_proj"]


def _to_heads(config: Mamba2Config, leaf: jax.Array) -> jax.Array:
    """Returns `[B, T, N]` seen by every head: `[B, T, H, N]`."""
    shape = (*leaf.shape[:2], config.num_heads, config.state_size)
    return jnp.broadcast_to(leaf[:, :, None], shape)


def shift_in(past: jax.Array, new: jax.Array, num_rows: jax.Array) -> jax.Array:
    """Returns the last `C - 1` inputs after `num_rows` `[B]` rows of `new` `[B, T, F]`."""
    both = jnp.concatenate([past, new], axis=1)
    size = past.shape[1]
    return jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, size))(both, num_rows)


def extend(config, params, conv, hidden, x, num_valid):
    """Advances one layer by a chunk; padding rows enter neither plane.

    Args:
      config: the sizes.
      params: the layer's parameters.
      conv: `[B, C-1, F]`.
      hidden: `[B, H, P, N]`.
      x: `[B, T, D]` the chunk's activations.
      num_valid: `[B]` int32, how many rows of the chunk count.

    Returns:
      conv, hidden and the outputs `[B, T, D]`.
    """
    gate, conv_input, step_size = _project(config, params, x)
    drive, c, skip = _drive(config, params, _convolve(params, conv, conv_input), step_size)
    valid = jnp.arange(x.shape[1]) < num_valid[:, None]
    hidden, outputs = ssd(
        hidden,
        jnp.where(valid[..., None], drive.log_decay, 0.0),
        jnp.where(valid[..., None, None], drive.x, 0.0),
        _to_heads(config, drive.b),
        _to_heads(config, c),
        chunk=config.chunk,
    )
    conv = shift_in(conv, conv_input, num_valid)
    return conv, hidden, _finish(params, outputs + skip, gate)


def step(config, params, conv, hidden, x):
    """Advances one layer by one token: `x` `[B, 1, D]`."""
    gate, conv_input, step_size = _project(config, params, x)
    drive, c, skip = _drive(config, params, _convolve(params, conv, conv_input), step_size)
    b = _to_heads(config, drive.b)[:, 0]
    all_rows = jnp.ones(x.shape[:1], bool)
    hidden = advance(hidden, drive.log_decay[:, 0], drive.x[:, 0], b, all_rows)
    outputs = jnp.einsum("bhpn,bn->bhp", hidden, c[:, 0])[:, None]
    conv = jnp.concatenate([conv[:, 1:], conv_input], axis=1)
    return conv, hidden, _finish(params, outputs + skip, gate)


def verify(config, params, conv, hidden, x):
    """Reads a window `x` `[B, K, D]` and leaves both planes alone.

    Returns:
      the conv inputs `[B, K, F]`, the `Drive` (together the trace) and the outputs.
    """
    gate, conv_input, step_size = _project(config, params, x)
    drive, c, skip = _drive(config, params, _convolve(params, conv, conv_input), step_size)
    outputs = window_outputs(
        hidden,
        drive.log_decay,
        drive.x,
        _to_heads(config, drive.b),
        _to_heads(config, c),
    )
    return conv_input, drive, _finish(params, outputs + skip, gate)


def replay(hidden: jax.Array, drive: Drive, num_rows: jax.Array) -> jax.Array:
    """Returns `hidden` `[L, B, H, P, N]` of all layers after `num_rows` `[B]` rows.

    One pass over the state whatever the window's width: the rows are unrolled inside
    one expression, and all layers are in it.

    Args:
      hidden: `[L, B, H, P, N]`.
      drive: leaves `[L, B, K, ...]`.
      num_rows: `[B]` int32.
    """
    heads = hidden.shape[2]
    for row in range(drive.x.shape[2]):
        b = drive.b[:, :, row]
        b = jnp.broadcast_to(b[:, :, None], (*b.shape[:2], heads, b.shape[-1]))
        keep = jnp.broadcast_to(row < num_rows, hidden.shape[:2])
        hidden = advance(hidden, drive.log_decay[:, :, row], drive.x[:, :, row], b, keep)
    return hidden

"""The gated short convolution of LFM2 (arXiv 2511.23404): no recurrence, so a few last inputs are all its state.

State of one layer: the last `C - 1` gated inputs, before they are convolved (`conv`,
`[B, C-1, D]`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from statecore.models.mixers._causal_conv import advanced, convolve, shift_layers
from statecore.models.mixers._layers import linear
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConv:
    """A convolution between two gates: `out_proj(c * conv(b * x))`.

    Parameters: `in_proj` `[D, 3D]` (b, c and x side by side), `conv_weight` `[C, D]`,
    `out_proj` `[D, D]`, and the biases of all three.
    """

    width: int
    num_taps: int = 3  # C
    has_bias: bool = False

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        shapes = {
            "in_proj": Param(shape=(self.width, 3 * self.width)),
            "conv_weight": Param(shape=(self.num_taps, self.width)),
            "out_proj": Param(shape=(self.width, self.width), init="residual"),
        }
        if self.has_bias:
            widths = {"in_proj": 3 * self.width, "conv": self.width, "out_proj": self.width}
            shapes |= {f"{name}_bias": Param(shape=(width,), init="zeros") for name, width in widths.items()}
        return shapes

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """The convolution's last inputs."""
        return {"conv": PlaneSpec(kind="shift", shape=(self.width,), rows=self.num_taps - 1)}

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]`, the plane and the trace; see `Mixer`."""
        del index
        opening, closing, inner = jnp.split(linear(params, "in_proj", x), 3, axis=-1)
        conv_input = opening * inner
        out = linear(params, "out_proj", closing * convolve(params, planes["conv"], conv_input))
        if chunk.mode == "verify":
            return out, {}, {"conv_input": conv_input}
        return out, {"conv": advanced(planes["conv"], conv_input, chunk)}, {}

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Returns the plane `[L, B, C-1, D]` after `num_rows` `[B]` rows; see `Mixer`."""
        return {"conv": shift_layers(planes["conv"], trace["conv_input"], num_rows)}

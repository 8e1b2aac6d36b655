"""The multilayer perceptrons, which keep no state."""

import dataclasses

import jax
import jax.numpy as jnp

from statecore.models.mixers._layers import ACTIVATIONS, linear
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    """An MLP, gated (arXiv 2002.05202) or plain.

    Parameters: `gate_up` `[D, 2F]`, or `up` `[D, F]` if it is plain, and `down` `[F, D]`.

    gate_scale, out_scale: multipliers of the gate before its activation and of the output.
    """

    width: int
    inner: int
    activation: str = "silu"
    is_gated: bool = True
    has_bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        first, columns = ("gate_up", 2 * self.inner) if self.is_gated else ("up", self.inner)
        shapes = {
            first: Param(shape=(self.width, columns)),
            "down": Param(shape=(self.inner, self.width), init="residual"),
        }
        if self.has_bias:
            shapes[f"{first}_bias"] = Param(shape=(columns,), init="zeros")
            shapes["down_bias"] = Param(shape=(self.width,), init="zeros")
        return shapes

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """None: nothing is kept."""
        return {}

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]`; see `Mixer`."""
        del planes, index, chunk
        return self.apply(params, x), {}, {}

    def apply(self, params: Arrays, x: jax.Array) -> jax.Array:
        """Returns the output of `x` `[..., D]`."""
        act = ACTIVATIONS[self.activation]
        if self.is_gated:
            gate, up = jnp.split(linear(params, "gate_up", x), 2, axis=-1)
            inner = act(gate * self.gate_scale if self.gate_scale != 1.0 else gate) * up
        else:
            inner = act(linear(params, "up", x))
        out = linear(params, "down", inner)
        return out * self.out_scale if self.out_scale != 1.0 else out

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Nothing is kept."""
        del trace, num_rows
        return planes

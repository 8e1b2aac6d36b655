"""What a mixer is: the part of a layer that looks at other tokens, or none, and keeps the state that this takes.

A mixer is a frozen record of sizes with pure methods. It declares its parameters and the
planes of one layer; the decoder stacks the planes of equal layers, `[L, B, ...]`, and
hands each mixer its own part. Append and sliding planes come stacked and are written in
place at `index`; shift and recurrent planes come as this layer's slice.
"""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Mode = Literal["extend", "step", "verify"]
Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Param:
    """One parameter.

    init: how it starts, by a name that `initial` knows.
    is_float32: whether it is float32 whatever the other parameters are.
    """

    shape: tuple[int, ...]
    init: str = "fan_in"
    is_float32: bool = False

    def dtype(self, others: DTypeLike) -> DTypeLike:
        """Returns its dtype, where the other parameters have `others`."""
        return jnp.float32 if self.is_float32 else others


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaneSpec:
    """One plane of one layer.

    kind: `append`, `sliding`, `shift` or `recurrent`.
    shape: of one row, or of the whole for `recurrent`.
    rows: of a ring or a shift register; None for `append`, which has the capacity.
    window: what a token of a `sliding` plane sees, itself included.
    is_float32: whether it is float32 whatever the parameters are.
    fill: what an empty state holds.
    """

    kind: Literal["append", "sliding", "shift", "recurrent"]
    shape: tuple[int, ...]
    rows: int | None = None
    window: int | None = None
    is_float32: bool = False
    fill: float = 0.0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens of one pass.

    mode: `extend` takes a chunk, `step` one token, `verify` a window, of which nothing
      enters shift and recurrent planes.
    position: `[B]` int32, tokens already there.
    num_valid: `[B]` int32, rows that count.
    length: `T`.
    """

    mode: Mode
    position: jax.Array
    num_valid: jax.Array
    length: int

    @property
    def positions(self) -> jax.Array:
        """The absolute position of each row, `[B, T]`."""
        return self.position[:, None] + jnp.arange(self.length)

    @property
    def valid(self) -> jax.Array:
        """Which rows count, `[B, T]`."""
        return jnp.arange(self.length) < self.num_valid[:, None]


class Mixer(Protocol):
    """A mixer, or an MLP, which keeps no state."""

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        ...

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """The state of one layer; names are those of the stacked planes."""
        ...

    def mix(
        self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk
    ) -> tuple[jax.Array, Arrays, Arrays]:
        """Returns the output `[B, T, D]` of `x` `[B, T, D]`, the planes it wrote, and what a replay needs.

        A verify writes append and sliding planes only, and is alone in leaving something
        to replay.
        """
        ...

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Returns the shift and recurrent planes `[L, B, ...]` of all layers after `num_rows` `[B]` kept rows.

        `trace` is what the verifies left, stacked over the layers: `[L, B, K, ...]`.
        """
        ...

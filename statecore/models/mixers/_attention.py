"""Causal attention over all rows (append planes) or over a ring of the last ones (sliding planes).

State of one full layer: `key` and `value` `[B, S, G, D]`, row `p` written by the token
at position `p`. State of one sliding layer: `ring_key` and `ring_value` with `R` rows,
row `p % R`. `G` key-value heads serve `H` query heads (grouped queries, arXiv 2305.13245).
"""

import dataclasses

import jax
import jax.numpy as jnp

from statecore.models.mixers._cache import attend, full_rows, ring_chunk, ring_rows
from statecore.models.mixers._layers import Norm, linear
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec
from statecore.models.mixers._rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention mixer.

    Parameters: `qkv_proj` `[D, (H + 2G) D]` (with `H D` more columns at its end for an
    output gate), `out_proj` `[H D, D]`, their biases, and `q_norm` and `k_norm` `[D]`.

    scale: of the scores; `head_size ** -0.5` if None.
    window: of a sliding layer, `W`; None sees everything.
    ring: rows `R` of a sliding layer; windows of a verify may have `R - W + 1` tokens.
    head_norm: of each query and key head, before rotation.
    has_gate: whether a sigmoid gate is multiplied onto the output (Qwen3-Next).
    key_scale, in_scale, out_scale: multipliers (Falcon-H1).
    """

    width: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_size: int  # D
    rope: Rope | None = None
    scale: float | None = None
    window: int | None = None
    ring: int | None = None
    head_norm: Norm | None = None
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_gate: bool = False
    key_scale: float = 1.0
    in_scale: float = 1.0
    out_scale: float = 1.0

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        inner, heads = self.num_heads * self.head_size, self.num_heads + 2 * self.num_kv_heads
        columns = heads * self.head_size + (inner if self.has_gate else 0)
        shapes = {
            "qkv_proj": Param(shape=(self.width, columns)),
            "out_proj": Param(shape=(inner, self.width), init="residual"),
        }
        if self.has_qkv_bias:
            shapes["qkv_proj_bias"] = Param(shape=(columns,), init="zeros")
        if self.has_out_bias:
            shapes["out_proj_bias"] = Param(shape=(self.width,), init="zeros")
        if self.head_norm is not None:
            init = "zeros" if self.head_norm.offset else "ones"
            shapes |= {name: Param(shape=(self.head_size,), init=init) for name in ("q_norm", "k_norm")}
        return shapes

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """Keys and values of one layer."""
        row = self.num_kv_heads, self.head_size
        if self.window is None:
            spec = PlaneSpec(kind="append", shape=row)
            return {"key": spec, "value": spec}
        spec = PlaneSpec(kind="sliding", shape=row, rows=self.ring, window=self.window)
        return {"ring_key": spec, "ring_value": spec}

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]` and the caches; see `Mixer`."""
        query, key, value, gate = self._project(params, x, chunk)
        names = tuple(self.planes)
        caches = tuple(planes[name] for name in names)
        scale = self.head_size**-0.5 if self.scale is None else self.scale
        if self.window is None:
            caches, keys, values, visible = full_rows(caches, index, key, value, chunk)
        elif chunk.mode == "extend":
            caches, keys, values, visible = ring_chunk(caches, index, key, value, chunk, self.window)
        else:
            caches, keys, values, visible = ring_rows(caches, index, key, value, chunk, self.window)
        mixed = attend(query, keys, values, visible, scale)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        out = linear(params, "out_proj", mixed)
        out = out * self.out_scale if self.out_scale != 1.0 else out
        return out, dict(zip(names, caches, strict=True)), {}

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Nothing to do: the position says which rows count."""
        del trace, num_rows
        return planes

    def _project(self, params: Arrays, x: jax.Array, chunk: Chunk):
        """Returns queries `[B, T, H, D]`, keys and values `[B, T, G, D]`, and the gate `[B, T, H*D]` or None."""
        x = x * self.in_scale if self.in_scale != 1.0 else x
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        ends = [sum(counts[: i + 1]) * self.head_size for i in range(3)]
        *parts, gate = jnp.split(linear(params, "qkv_proj", x), ends, axis=-1)
        query, key, value = (
            part.reshape(*x.shape[:2], num, self.head_size) for part, num in zip(parts, counts, strict=True)
        )
        key = key * self.key_scale if self.key_scale != 1.0 else key
        if self.head_norm is not None:
            query = self.head_norm(query, params["q_norm"])
            key = self.head_norm(key, params["k_norm"])
        if self.rope is not None:
            query, key = (self.rope.rotate(part, chunk.positions) for part in (query, key))
        return query, key, value, gate if self.has_gate else None

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): of a token one latent is kept for all heads.

State of one layer, in rows of the capacity: `latent` `[B, S, R]`, from which each head's
key and value would be expanded, and `rope_key` `[B, S, P]`, the rotated part of the keys,
which the heads share. Nothing is expanded here: queries are brought into the latent
space instead, so that reading a row costs the same for one head as its key would.
"""

import dataclasses

import jax
import jax.numpy as jnp

from statecore.models.mixers._cache import full_rows, hide, weigh
from statecore.models.mixers._layers import Norm, linear
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec
from statecore.models.mixers._rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """A latent attention mixer.

    Parameters: `q_proj` `[D, H (K + P)]`, or `q_in_proj` `[D, Q]`, `q_norm` `[Q]` and `q_out_proj`
    `[Q, H (K + P)]`; `kv_in_proj` `[D, R + P]`, `kv_norm` `[R]` and `kv_out_proj` `[R, H (K + V)]`;
    `out_proj` `[H V, D]`; and the biases of those that read the residual or write to it, but `q_proj`.

    latent: `R`; query_latent: `Q`, or None where queries are projected at once.
    plain_size: `K`, of a query and key head the part that is not rotated.
    rope: its `dim` is `P`.
    norm: of the latents.
    is_interleaved: whether a file has the pairs that are rotated together side by side;
      parameters never do.
    """

    width: int
    num_heads: int  # H
    latent: int
    plain_size: int
    value_size: int  # V
    rope: Rope
    query_latent: int | None = None
    norm: Norm = Norm(eps=1e-6)
    has_bias: bool = False
    is_interleaved: bool = False

    @property
    def key_size(self) -> int:
        """`K + P`."""
        return self.plain_size + self.rope.dim

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        queries, rotated = self.num_heads * self.key_size, self.rope.dim
        inner = self.num_heads * self.value_size
        shapes = {
            "kv_in_proj": Param(shape=(self.width, self.latent + rotated)),
            "kv_norm": Param(shape=(self.latent,), init="ones"),
            "kv_out_proj": Param(shape=(self.latent, self.num_heads * (self.plain_size + self.value_size))),
            "out_proj": Param(shape=(inner, self.width), init="residual"),
        }
        biases = {"kv_in_proj": self.latent + rotated, "out_proj": self.width}
        if self.query_latent is None:
            shapes["q_proj"] = Param(shape=(self.width, queries))
        else:
            shapes["q_in_proj"] = Param(shape=(self.width, self.query_latent))
            shapes["q_norm"] = Param(shape=(self.query_latent,), init="ones")
            shapes["q_out_proj"] = Param(shape=(self.query_latent, queries))
            biases["q_in_proj"] = self.query_latent
        if self.has_bias:
            shapes |= {f"{name}_bias": Param(shape=(width,), init="zeros") for name, width in biases.items()}
        return shapes

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """The latent and the rotated key of each token."""
        return {
            "latent": PlaneSpec(kind="append", shape=(self.latent,)),
            "rope_key": PlaneSpec(kind="append", shape=(self.rope.dim,)),
        }

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]` and the caches; see `Mixer`."""
        expand = params["kv_out_proj"].reshape(self.latent, self.num_heads, -1)
        to_key, to_value = jnp.split(expand, [self.plain_size], axis=-1)
        query, rope_query = self._queries(params, x, chunk)
        latent, rope_key = self._rows(params, x, chunk)
        names = tuple(self.planes)
        caches = tuple(planes[name] for name in names)
        caches, latents, rope_keys, visible = full_rows(caches, index, latent, rope_key, chunk)
        query = jnp.einsum("bthk,rhk->bthr", query, to_key)
        scores = _scores(query, latents) + _scores(rope_query, rope_keys)
        weights = weigh(scores * self.key_size**-0.5, visible[:, None]).astype(latents.dtype)
        mixed = jnp.einsum("bhts,bsr->bthr", weights, hide(latents, visible))
        mixed = jnp.einsum("bthr,rhv->bthv", mixed, to_value)
        out = linear(params, "out_proj", mixed.reshape(*x.shape[:2], -1))
        return out, dict(zip(names, caches, strict=True)), {}

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Nothing to do: the position says which rows count."""
        del trace, num_rows
        return planes

    def _queries(self, params: Arrays, x: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Returns the plain queries `[B, T, H, K]` and the rotated ones `[B, T, H, P]`."""
        if self.query_latent is None:
            query = linear(params, "q_proj", x)
        else:
            query = linear(params, "q_out_proj", self.norm(linear(params, "q_in_proj", x), params["q_norm"]))
        query = query.reshape(*x.shape[:2], self.num_heads, self.key_size)
        plain, rotated = jnp.split(query, [self.plain_size], axis=-1)
        return plain, self.rope.rotate(rotated, chunk.positions)

    def _rows(self, params: Arrays, x: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Returns what is kept of each token: `[B, T, R]` and `[B, T, P]`."""
        latent, rotated = jnp.split(linear(params, "kv_in_proj", x), [self.latent], axis=-1)
        rotated = self.rope.rotate(rotated[:, :, None], chunk.positions)[:, :, 0]
        return self.norm(latent, params["kv_norm"]), rotated


def _scores(query: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the products `[B, H, T, S]` of queries `[B, T, H, R]` with rows `[B, S, R]`, in float32."""
    return jnp.einsum("bthr,bsr->bhts", query, rows, preferred_element_type=jnp.float32)

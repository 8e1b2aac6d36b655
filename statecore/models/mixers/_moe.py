"""A mixture of experts (arXiv 1701.06538): MLPs of which a router chooses a few for each token, and one that all share.

It keeps no state. Rows are sorted by their experts and go through them in blocks; they meet in
no sum, so that padding may hold anything.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from statecore.models.mixers._layers import ACTIVATIONS, linear
from statecore.models.mixers._mixer import Arrays, Chunk, Param, PlaneSpec
from statecore.models.mixers._mlp import Mlp

# A token's weights are divided by their sum, which may underflow.
_LEAST_SUM = 1e-20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moe:
    """Experts behind a router.

    Parameters: `router` `[D, E]` and `correction` `[E]`, in float32 always; the experts'
    `gate_up` `[E, D, 2F]`, or `up` `[E, D, F]` if they are plain, and `down` `[E, F, D]`;
    those of the shared expert as `Mlp` names them, each with `shared_` before it, and its
    gate `shared_gate` `[D, 1]`; `latent_in` `[D, M]` and `latent_out` `[M, D]` with their
    biases, between which the experts are `M` wide instead of `D`.

    num_experts: `E`; inner: `F`; num_chosen: experts a token.
    scores: what the router makes of its products: `sigmoid` (DeepSeek-V3) or `softmax`.
    num_groups, num_kept_groups: experts are chosen within the groups of consecutive ones whose best
      two have the highest sum (DeepSeek-V3, arXiv 2412.19437).
    has_correction: whether a bias is added to the scores for the choice, and not to the weights.
    is_normalized: whether a token's weights sum to one before `scale` multiplies them.
    shared: the expert of all tokens; has_shared_gate: whether a sigmoid weighs it (Qwen3-Next).
    latent: `M`; None leaves the experts as wide as the model (Nemotron-H has it).
    """

    width: int
    inner: int
    num_experts: int
    num_chosen: int
    scores: Literal["sigmoid", "softmax"] = "softmax"
    num_groups: int = 1
    num_kept_groups: int = 1
    has_correction: bool = False
    is_normalized: bool = True
    scale: float = 1.0
    activation: str = "silu"
    is_gated: bool = True
    shared: Mlp | None = None
    has_shared_gate: bool = False
    latent: int | None = None
    has_latent_bias: bool = False

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of one layer."""
        outer = self.latent or self.width
        first, columns = ("gate_up", 2 * self.inner) if self.is_gated else ("up", self.inner)
        shapes = {
            "router": Param(shape=(self.width, self.num_experts), is_float32=True),
            first: Param(shape=(self.num_experts, outer, columns)),
            "down": Param(shape=(self.num_experts, self.inner, outer), init="residual"),
        }
        if self.has_correction:
            shapes["correction"] = Param(shape=(self.num_experts,), init="zeros", is_float32=True)
        if self.shared is not None:
            shapes |= {f"shared_{name}": param for name, param in self.shared.params.items()}
        if self.has_shared_gate:
            shapes["shared_gate"] = Param(shape=(self.width, 1))
        return shapes | self._latent_params

    @property
    def _latent_params(self) -> dict[str, Param]:
        if self.latent is None:
            return {}
        shapes = {
            "latent_in": Param(shape=(self.width, self.latent)),
            "latent_out": Param(shape=(self.latent, self.width)),
        }
        if self.has_latent_bias:
            shapes["latent_in_bias"] = Param(shape=(self.latent,), init="zeros")
            shapes["latent_out_bias"] = Param(shape=(self.width,), init="zeros")
        return shapes

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """None: nothing is kept."""
        return {}

    def mix(self, params: Arrays, x: jax.Array, planes: Arrays, index: int, chunk: Chunk):
        """Returns the output `[B, T, D]`; see `Mixer`."""
        del planes, index, chunk
        return self.apply(params, x), {}, {}

    def replay(self, planes: Arrays, trace: Arrays, num_rows: jax.Array) -> Arrays:
        """Nothing is kept."""
        del trace, num_rows
        return planes

    def apply(self, params: Arrays, x: jax.Array) -> jax.Array:
        """Returns the output of `x` `[..., D]`."""
        rows = x.reshape(-1, self.width)
        weights, chosen = self.route(params, rows)
        inner = rows if self.latent is None else linear(params, "latent_in", rows)
        routed = self._routed(params, inner, weights, chosen)
        out = routed if self.latent is None else linear(params, "latent_out", routed)
        if self.shared is not None:
            out = out + self._shared(params, rows, self.shared)
        return out.reshape(x.shape)

    def route(self, params: Arrays, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns of each row `[N, D]` the weights of its experts, `[N, num_chosen]` float32, and their numbers."""
        # In less than float32 another expert may win.
        logits = jnp.matmul(
            rows.astype(jnp.float32), params["router"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        scores = jax.nn.sigmoid(logits) if self.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        choice = scores + params["correction"] if self.has_correction else scores
        choice = self._of_kept_groups(choice) if self.num_kept_groups < self.num_groups else choice
        chosen = jax.lax.top_k(choice, self.num_chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.is_normalized:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _LEAST_SUM)
        return weights * self.scale, chosen

    def _of_kept_groups(self, choice: jax.Array) -> jax.Array:
        """Returns `choice` `[N, E]` with minus infinity where the group of an expert is not kept."""
        groups = choice.reshape(choice.shape[0], self.num_groups, -1)
        best = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
        kept = jax.lax.top_k(best, self.num_kept_groups)[1]
        is_kept = jnp.any(kept[..., None] == jnp.arange(self.num_groups), axis=-2)
        return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(choice.shape)

    def _routed(self, params: Arrays, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Returns the weighted outputs of the chosen experts, `[N, D]`: each reads its own rows alone."""
        first = params["gate_up" if self.is_gated else "up"]
        blocks = _arrange(chosen, self.num_experts)

        def through_expert(_, block):
            expert, own = block
            return None, self._activated(rows[own] @ first[expert]) @ params["down"][expert]

        out = jax.lax.scan(through_expert, None, (blocks.experts, blocks.rows))[1]
        out = out.reshape(-1, rows.shape[1])[blocks.places].astype(jnp.float32)
        return jnp.sum(out * weights[..., None], axis=1).astype(rows.dtype)

    def _activated(self, projected: jax.Array) -> jax.Array:
        """Returns what an expert's second matrix reads, `[..., F]`."""
        act = ACTIVATIONS[self.activation]
        if not self.is_gated:
            return act(projected)
        gate, up = jnp.split(projected, 2, axis=-1)
        return act(gate) * up

    def _shared(self, params: Arrays, rows: jax.Array, expert: Mlp) -> jax.Array:
        """Returns the shared expert's output `[N, D]`, times its gate if it has one."""
        own = {name: params[f"shared_{name}"] for name in expert.params}
        out = expert.apply(own, rows)
        return out * jax.nn.sigmoid(rows @ params["shared_gate"]) if self.has_shared_gate else out


class _Blocks(NamedTuple):
    """Rows in blocks of one expert each, so many blocks as are enough however the router chooses.

    experts: `[M]`, each block's.
    rows: `[M, size]`; a block that is not full has any rows at its end.
    places: `[N, num_chosen]`, where each row's outputs are among all of the blocks.
    """

    experts: jax.Array
    rows: jax.Array
    places: jax.Array


def _arrange(chosen: jax.Array, num_experts: int) -> _Blocks:
    """Returns the blocks of the chosen experts `[N, num_chosen]`, about as large as an expert's share of the rows."""
    flat, num_pairs = chosen.reshape(-1), chosen.size
    size = max(1, num_pairs // num_experts)
    # Of each expert that is chosen at all one block may be short.
    num_short = min(num_experts, num_pairs)
    block = jnp.arange((num_pairs - num_short) // size + num_short)
    order, counts = jnp.argsort(flat), jnp.bincount(flat, length=num_experts)
    start, num_blocks = jnp.cumsum(counts) - counts, -(-counts // size)
    end = jnp.cumsum(num_blocks)
    expert = jnp.minimum(jnp.searchsorted(end, block, side="right"), num_experts - 1)
    first = end - num_blocks
    pairs = (start[expert] + (block - first[expert]) * size)[:, None] + jnp.arange(size)
    rows = order[jnp.minimum(pairs, num_pairs - 1)] // chosen.shape[1]
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(num_pairs))
    places = first[flat] * size + rank - start[flat]
    return _Blocks(expert, rows, places.reshape(chosen.shape))

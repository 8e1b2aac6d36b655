"""The embedded model: a byte-level language model with three kinds of state.

Mamba-2 layers, one full-attention layer without positions and one sliding layer with
rotary positions; each attention layer is followed by a gated MLP. `TinyHybrid` is the
Flax NNX module, for initialisation and training. Serving works on its parameters as a
plain dict, one entry a layer, and on states stacked over layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from statecore.models import _attention, _mamba2
from statecore.models._attention import AttentionConfig
from statecore.models._layers import rms_norm, swiglu
from statecore.models._mamba2 import Mamba2Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyHybridConfig:
    """Sizes of the model.

    layers: one letter a layer: `M` Mamba-2, `S` sliding attention, `A` full attention.
    ring_rows: rows `R` of a sliding layer; a window may have `R - W + 1` tokens.
    """

    vocab_size: int = 256
    width: int = 192
    layers: str = "MSMMAM"
    mlp_width: int = 384
    ring_rows: int = 96
    window: int = 64
    mamba: Mamba2Config = Mamba2Config(width=192, num_heads=12, head_size=32, state_size=32)
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32

    def attention(self, letter: str) -> AttentionConfig:
        """Returns the sizes of an attention layer, `S` or `A`."""
        return AttentionConfig(
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            window=self.window if letter == "S" else None,
        )


def _normal(rngs: nnx.Rngs, rows: int, columns: int, scale: float = 1.0) -> nnx.Param:
    draw = jax.random.normal(rngs.params(), (rows, columns))
    return nnx.Param(draw * scale * rows**-0.5)


class Mamba2Layer(nnx.Module):
    """A norm and a Mamba-2 mixer. Step sizes start between 0.001 and 0.1, as in the paper."""

    def __init__(self, config: TinyHybridConfig, rngs: nnx.Rngs):
        mamba = config.mamba
        heads = mamba.num_heads
        low, high = jnp.log(0.001), jnp.log(0.1)
        step_size = jnp.exp(jax.random.uniform(rngs.params(), (heads,)) * (high - low) + low)
        taps = jax.random.normal(rngs.params(), (mamba.num_taps, mamba.conv_width))
        self.norm_in = nnx.Param(jnp.ones(config.width))
        self.in_proj = _normal(rngs, config.width, mamba.inner + mamba.conv_width + heads)
        self.conv_weight = nnx.Param(taps * mamba.num_taps**-0.5)
        self.conv_bias = nnx.Param(jnp.zeros(mamba.conv_width))
        self.dt_bias = nnx.Param(step_size + jnp.log(-jnp.expm1(-step_size)))
        self.a_log = nnx.Param(jnp.log(jnp.linspace(1.0, 16.0, heads)))
        self.skip = nnx.Param(jnp.ones(heads))
        self.norm = nnx.Param(jnp.ones(mamba.inner))
        self.out_proj = _normal(rngs, mamba.inner, config.width, len(config.layers) ** -0.5)


class AttentionLayer(nnx.Module):
    """A norm, an attention mixer, a norm and a gated MLP."""

    def __init__(self, config: TinyHybridConfig, rngs: nnx.Rngs):
        inner = config.num_heads * config.head_size
        both = inner + 2 * config.num_kv_heads * config.head_size
        scale = len(config.layers) ** -0.5
        self.norm_in = nnx.Param(jnp.ones(config.width))
        self.qkv_proj = _normal(rngs, config.width, both)
        self.out_proj = _normal(rngs, inner, config.width, scale)
        self.norm_mlp = nnx.Param(jnp.ones(config.width))
        self.gate_up = _normal(rngs, config.width, 2 * config.mlp_width)
        self.down = _normal(rngs, config.mlp_width, config.width, scale)


class TinyHybrid(nnx.Module):
    """The whole model as a Flax NNX module; calling it is the training pass."""

    def __init__(self, config: TinyHybridConfig, *, rngs: nnx.Rngs):
        self.config = config
        kinds = {"M": Mamba2Layer, "S": AttentionLayer, "A": AttentionLayer}
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.width)) * 0.5)
        self.layers = nnx.Dict({f"layer_{i}": kinds[letter](config, rngs) for i, letter in enumerate(config.layers)})
        self.norm = nnx.Param(jnp.ones(config.width))
        self.head = _normal(rngs, config.width, config.vocab_size)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits `[B, T, V]` of `tokens` `[B, T]`, from an empty state."""
        return forward(self.config, plain_params(self), tokens)


def plain_params(model: TinyHybrid) -> dict:
    """Returns the parameters as a plain dict of arrays, which is what serving takes."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def init_state(config: TinyHybridConfig, batch: int, capacity: int) -> dict:
    """Returns an empty state; planes are stacked over the layers of their kind."""
    mamba, count = config.mamba, config.layers.count
    heads = config.num_kv_heads, config.head_size

    def zeros(letter, *shape):
        return jnp.zeros((count(letter), batch, *shape), jnp.float32)

    return {
        "conv": zeros("M", mamba.num_taps - 1, mamba.conv_width),
        "hidden": zeros("M", mamba.num_heads, mamba.head_size, mamba.state_size),
        "key": zeros("A", capacity, *heads),
        "value": zeros("A", capacity, *heads),
        "ring_key": zeros("S", config.ring_rows, *heads),
        "ring_value": zeros("S", config.ring_rows, *heads),
        "position": jnp.zeros(batch, jnp.int32),
    }


def _run(config, params, state, tokens, num_valid, mamba_layer, ring_layer):
    """Runs all layers; `mamba_layer(params, index, x)` says what a Mamba-2 layer does."""
    x = params["embed"][tokens]
    caches = {"A": (state["key"], state["value"]), "S": (state["ring_key"], state["ring_value"])}
    used = {"M": 0, "A": 0, "S": 0}
    for number, letter in enumerate(config.layers):
        layer, index = params["layers"][f"layer_{number}"], used[letter]
        used[letter] += 1
        inner = rms_norm(x, layer["norm_in"])
        if letter == "M":
            x = x + mamba_layer(layer, index, inner)
            continue
        attend = _attention.full if letter == "A" else ring_layer
        caches[letter], mixed = attend(
            config.attention(letter),
            layer,
            caches[letter],
            index,
            inner,
            state["position"],
            num_valid,
        )
        x = x + mixed
        x = x + swiglu(layer, rms_norm(x, layer["norm_mlp"]))
    logits = rms_norm(x, params["norm"]) @ params["head"]
    written = dict(zip(("key", "value"), caches["A"], strict=True))
    written |= dict(zip(("ring_key", "ring_value"), caches["S"], strict=True))
    return state | written, logits


def extend(config, params, state, tokens, num_valid):
    """Advances the state by a chunk; see `statecore.Backend` for the contract."""
    conv, hidden = [], []

    def mamba_layer(layer, index, x):
        new_conv, new_hidden, mixed = _mamba2.extend(
            config.mamba, layer, state["conv"][index], state["hidden"][index], x, num_valid
        )
        conv.append(new_conv)
        hidden.append(new_hidden)
        return mixed

    new, logits = _run(config, params, state, tokens, num_valid, mamba_layer, _attention.ring_chunk)
    moved = {"conv": jnp.stack(conv), "hidden": jnp.stack(hidden)}
    return new | moved | {"position": state["position"] + num_valid}, logits


def step(config, params, state, tokens):
    """Advances the state by one token a row."""
    conv, hidden = [], []

    def mamba_layer(layer, index, x):
        new_conv, new_hidden, mixed = _mamba2.step(config.mamba, layer, state["conv"][index], state["hidden"][index], x)
        conv.append(new_conv)
        hidden.append(new_hidden)
        return mixed

    one = jnp.ones_like(state["position"])
    new, logits = _run(config, params, state, tokens[:, None], one, mamba_layer, _attention.ring)
    moved = {"conv": jnp.stack(conv), "hidden": jnp.stack(hidden)}
    return new | moved | {"position": state["position"] + 1}, logits[:, 0]


def verify(config, params, state, tokens, num_valid):
    """Reads a window; writes attention rows only, keeps what replays the Mamba-2 layers."""
    conv_inputs, drives = [], []

    def mamba_layer(layer, index, x):
        conv_input, drive, mixed = _mamba2.verify(config.mamba, layer, state["conv"][index], state["hidden"][index], x)
        conv_inputs.append(conv_input)
        drives.append(drive)
        return mixed

    new, logits = _run(config, params, state, tokens, num_valid, mamba_layer, _attention.ring)
    drive = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drives)
    return new, logits, {"conv_input": jnp.stack(conv_inputs), "drive": drive}


def replay(state, trace, num_rows):
    """Advances the Mamba-2 planes and the position over the kept rows of a window."""
    shift_layers = jax.vmap(_mamba2.shift_in, in_axes=(0, 0, None))
    return state | {
        "conv": shift_layers(state["conv"], trace["conv_input"], num_rows),
        "hidden": _mamba2.replay(state["hidden"], trace["drive"], num_rows),
        "position": state["position"] + num_rows,
    }


def forward(config: TinyHybridConfig, params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the logits `[B, T, V]` of whole texts `[B, T]`: the training pass."""
    batch, length = tokens.shape
    num_valid = jnp.full(batch, length, jnp.int32)
    state = init_state(config, batch, length)
    return extend(config, params, state, tokens, num_valid)[1]

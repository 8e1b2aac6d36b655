"""How a decoder runs: one walk over its layers, for a chunk, a step or a window, and the replay of a window."""

from collections import defaultdict

import jax
import jax.numpy as jnp

from statecore.models._decoder import Block, Decoder, Place, layer_name
from statecore.models.mixers import Chunk, Mixer


def extend(decoder: Decoder, params: dict, state: dict, tokens: jax.Array, num_valid: jax.Array):
    """Advances the state by a chunk `[B, T]`; see `statecore.Backend` for the contract."""
    new, logits, _ = _walk(
        decoder, params, state, tokens, Chunk("extend", state["position"], num_valid, tokens.shape[1])
    )
    return new | {"position": state["position"] + num_valid}, logits


def extend_last(decoder: Decoder, params: dict, state: dict, tokens: jax.Array, num_valid: jax.Array):
    """As `extend`, with the logits `[B, V]` of each sequence's last token that counts."""
    chunk = Chunk("extend", state["position"], num_valid, tokens.shape[1])
    new, logits, _ = _walk(decoder, params, state, tokens, chunk, is_last=True)
    return new | {"position": state["position"] + num_valid}, logits[:, 0]


def step(decoder: Decoder, params: dict, state: dict, tokens: jax.Array):
    """Advances the state by one token of each sequence, `[B]`."""
    # Not a constant, or a kept row would be rounded in other ways here than inside a window.
    one = (state["position"] >= 0).astype(jnp.int32)
    new, logits, _ = _walk(decoder, params, state, tokens[:, None], Chunk("step", state["position"], one, 1))
    return new | {"position": state["position"] + 1}, logits[:, 0]


def verify(decoder: Decoder, params: dict, state: dict, tokens: jax.Array, num_valid: jax.Array):
    """Reads a window `[B, K]`: writes attention rows, and keeps what replays the other planes."""
    return _walk(decoder, params, state, tokens, Chunk("verify", state["position"], num_valid, tokens.shape[1]))


def replay(decoder: Decoder, state: dict, trace: dict, num_rows: jax.Array) -> dict:
    """Advances shift and recurrent planes and the position over the kept rows `[B]` of a window."""
    moved = {"position": state["position"] + num_rows}
    for group, (mixer, place) in decoder.groups.items():
        planes = {plane: state[name] for plane, name in place.names}
        for plane, leaf in mixer.replay(planes, trace[group], num_rows).items():
            moved[dict(place.names)[plane]] = leaf
    return state | moved


def _walk(
    decoder: Decoder, params: dict, state: dict, tokens: jax.Array, chunk: Chunk, *, is_last: bool = False
) -> tuple[dict, jax.Array, dict]:
    """Returns the state with the planes that were written, the logits and the trace of a verify.

    Logits are `[B, T, V]`, or `[B, 1, V]` of each sequence's last row that counts.
    """
    walk = _Walk(decoder, state, chunk)
    x = params["embed"][tokens]
    dtype = x.dtype
    x = x * jnp.asarray(decoder.embed_scale, dtype) if decoder.embed_scale != 1.0 else x
    x = x.astype(jnp.float32) if decoder.is_residual_float32 else x
    for number, blocks in enumerate(decoder.layers):
        layer = params["layers"][layer_name(number)]
        for name, block in blocks:
            x = x + walk.block(name, block, layer, x, dtype).astype(x.dtype)
    if is_last:
        x = jnp.take_along_axis(x, jnp.maximum(chunk.num_valid - 1, 0)[:, None, None], axis=1)
    logits = _head(decoder, params, decoder.norm(x, params["norm"]).astype(dtype))
    return walk.state(), logits, walk.trace()


def _head(decoder: Decoder, params: dict, x: jax.Array) -> jax.Array:
    """Returns the logits `[B, T, V]`, in float32."""
    if decoder.is_tied:
        logits = jnp.einsum("btd,vd->btv", x, params["embed"], preferred_element_type=jnp.float32)
    else:
        logits = jnp.matmul(x, params["head"], preferred_element_type=jnp.float32)
    logits = logits * decoder.logit_scale if decoder.logit_scale != 1.0 else logits
    return logits if decoder.logit_cap is None else jnp.tanh(logits / decoder.logit_cap) * decoder.logit_cap


class _Walk:
    """What one walk over the layers gathers, at trace time: nothing of it outlives the call."""

    def __init__(self, decoder: Decoder, state: dict, chunk: Chunk):
        self._decoder, self._before, self._chunk = decoder, state, chunk
        self._places = iter(decoder.places)
        self._written: dict[str, jax.Array] = {}
        self._kept: dict[str, dict[str, list[jax.Array]]] = defaultdict(lambda: defaultdict(list))

    def block(self, name: str, block: Block, layer: dict, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns what a block adds to the residual `x` `[B, T, D]`."""
        inner = x if block.norm_in is None else block.norm_in(x, layer[f"{name}_norm_in"])
        inner = inner.astype(dtype)
        out, *others = [self._mix(mixer, layer[mixer_name], inner) for mixer_name, mixer in block.mixers]
        for other in others:
            out = out + other
        if block.norm_out is not None:
            out = block.norm_out(out, layer[f"{name}_norm_out"])
        return out * block.scale if block.scale != 1.0 else out

    def _mix(self, mixer: Mixer, params: dict, x: jax.Array) -> jax.Array:
        place = next(self._places)
        if place is None:
            return mixer.mix(params, x, {}, 0, self._chunk)[0]
        planes = {plane: self._plane(mixer, plane, name, place) for plane, name in place.names}
        out, written, kept = mixer.mix(params, x, planes, place.index, self._chunk)
        names = dict(place.names)
        for plane, leaf in written.items():
            name = names[plane]
            # In place, layer by layer: stacked at the end, all of them would be held twice.
            self._written[name] = leaf if _is_rows(mixer, plane) else self._full(name).at[place.index].set(leaf)
        for part, leaf in kept.items():
            self._kept[place.group][part].append(leaf)
        return out

    def _plane(self, mixer: Mixer, plane: str, name: str, place: Place) -> jax.Array:
        leaf = self._full(name)
        return leaf if _is_rows(mixer, plane) else leaf[place.index]

    def _full(self, name: str) -> jax.Array:
        """Returns a plane of all layers, as written so far."""
        return self._written[name] if name in self._written else self._before[name]

    def state(self) -> dict:
        """Returns the state with what was written, the position as it was."""
        return self._before | self._written

    def trace(self) -> dict:
        """Returns what a verify keeps, `[L, B, K, ...]`, by group."""
        return {
            group: {part: jnp.stack(leaves) for part, leaves in parts.items()} for group, parts in self._kept.items()
        }


def _is_rows(mixer: Mixer, plane: str) -> bool:
    return mixer.planes[plane].kind in ("append", "sliding")

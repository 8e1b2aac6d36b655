"""Layers that hybrids of Mamba-2 and attention share: a mixer, or two side by side, then an MLP or experts."""

from collections.abc import Callable
from typing import Any

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._sources import Table, attention, mamba2, matrix, plain, prefixed
from statecore.models.mixers import Attention, Mamba2, Mixer, Norm

Layer = tuple[tuple[str, Block], ...]


def hybrid_layer(mixers: dict[str, Mixer], feed: Mixer, norm: Norm, *, scale: float = 1.0) -> Layer:
    """Returns a layer of `mixers`, all on one input, and an MLP or experts; `scale` is that of both residual blocks."""
    return (
        ("mixer", Block(mixers=tuple(mixers.items()), norm_in=norm, scale=scale)),
        ("mlp", Block(mixers=(("mlp", feed),), norm_in=norm, scale=scale)),
    )


def hybrid_tensors(decoder: Decoder, *, norm: str, feed_norm: str, feed: Callable[[Any, str], Table]) -> Table:
    """Returns the names of a hybrid's file.

    Args:
      decoder: of layers as `hybrid_layer` makes them.
      norm, feed_norm: what the file calls the norm before the head, and the one before the MLP.
      feed: `feed(mixer, layer)`, the table of the MLP or the experts of a layer with that name.
    """
    table = {"embed": plain("model.embed_tokens.weight"), "norm": plain(f"model.{norm}.weight")}
    if not decoder.is_tied:
        table["head"] = matrix("lm_head.weight")
    for number in range(len(decoder.layers)):
        layer, theirs = f"layers.{layer_name(number)}", f"model.layers.{number}"
        table[f"{layer}.mixer_norm_in"] = plain(f"{theirs}.input_layernorm.weight")
        table[f"{layer}.mlp_norm_in"] = plain(f"{theirs}.{feed_norm}.weight")
        for name, mixer in dict(decoder.layers[number])["mixer"].mixers:
            table |= prefixed(f"{layer}.{name}", _mixer_tensors(mixer, theirs))
        table |= prefixed(f"{layer}.mlp", feed(decoder.mixer(number, "mlp"), theirs))
    return table


def _mixer_tensors(mixer: Any, layer: str) -> Table:
    if isinstance(mixer, Attention):
        return attention(mixer, f"{layer}.self_attn")
    assert isinstance(mixer, Mamba2)
    return mamba2(mixer, f"{layer}.mamba")

"""The embedded model: a byte-level language model with three kinds of state.

Mamba-2 layers, one full-attention layer without positions and one sliding layer with
rotary positions; each attention layer is followed by a gated MLP.
"""

import dataclasses

from statecore.models._decoder import Block, Decoder
from statecore.models.mixers import Attention, Mamba2, Mlp, Norm, Rope


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
    mamba_heads: int = 12
    mamba_head_size: int = 32
    state_size: int = 32
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32


def tiny_hybrid(config: TinyHybridConfig) -> Decoder:
    """Returns the embedded model's decoder."""
    kinds = {
        "M": (("mixer", _block("mamba", _mamba(config))),),
        "S": (("mixer", _block("attention", _attention(config, is_sliding=True))), _mlp(config)),
        "A": (("mixer", _block("attention", _attention(config, is_sliding=False))), _mlp(config)),
    }
    return Decoder(
        name="tiny-hybrid",
        vocab_size=config.vocab_size,
        width=config.width,
        layers=tuple(kinds[letter] for letter in config.layers),
        norm=Norm(),
    )


def _block(name: str, mixer: Attention | Mamba2 | Mlp) -> Block:
    return Block(mixers=((name, mixer),), norm_in=Norm())


def _mlp(config: TinyHybridConfig) -> tuple[str, Block]:
    return "mlp", _block("mlp", Mlp(width=config.width, inner=config.mlp_width))


def _mamba(config: TinyHybridConfig) -> Mamba2:
    return Mamba2(
        width=config.width,
        num_heads=config.mamba_heads,
        head_size=config.mamba_head_size,
        state_size=config.state_size,
    )


def _attention(config: TinyHybridConfig, *, is_sliding: bool) -> Attention:
    return Attention(
        width=config.width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        rope=Rope(dim=config.head_size, base=10_000.0) if is_sliding else None,
        window=config.window if is_sliding else None,
        ring=config.ring_rows if is_sliding else None,
    )

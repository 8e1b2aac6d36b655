"""Llama (arXiv 2302.13971) and the families that differ by a switch: Mistral, Qwen2, Qwen3, SmolLM3.

State: keys and values of every layer, in rows of the capacity, or of a ring where a layer slides.
"""

import dataclasses
from collections.abc import Callable

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._options import Options
from statecore.models.families._rope_options import take_rope
from statecore.models.families._shapes import head_sizes, ring_rows
from statecore.models.families._sources import Table, attention, matrix, mlp, plain, prefixed
from statecore.models.mixers import Attention, Mlp, Norm

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Of Mistral and Qwen, where a file does not say whether there is one.
_WINDOW = 4096

# Returns the attention of each layer, from that which the sizes alone give.
Vary = Callable[[Options, Attention, int, Norm], list[Attention]]


def _reader(vary: Vary, *, base: float, is_tied: bool) -> Callable[[Options], Decoder]:
    def read(options: Options) -> Decoder:
        num_layers, width = options.layers(), options.whole("hidden_size")
        norm = Norm(eps=options.positive("rms_norm_eps", 1e-6))
        heads = head_sizes(options, width)
        plain_attention = Attention(width=width, rope=take_rope(options, heads["head_size"], base=base), **heads)
        mixers = vary(options, plain_attention, num_layers, norm)
        feed = Mlp(
            width=width,
            inner=options.whole("intermediate_size"),
            activation=options.choice("hidden_act", "silu"),
            has_bias=options.flag("mlp_bias", False),
        )
        return Decoder(
            name=options.family,
            vocab_size=options.whole("vocab_size"),
            width=width,
            layers=tuple(
                (
                    ("attention", Block(mixers=(("attention", mixer),), norm_in=norm)),
                    ("mlp", Block(mixers=(("mlp", feed),), norm_in=norm)),
                )
                for mixer in mixers
            ),
            norm=norm,
            is_tied=options.flag("tie_word_embeddings", is_tied),
        )

    return read


def _llama(options: Options, base: Attention, num_layers: int, norm: Norm) -> list[Attention]:
    del norm
    has_bias = options.flag("attention_bias", False)
    return [dataclasses.replace(base, has_qkv_bias=has_bias, has_out_bias=has_bias)] * num_layers


def _mistral(options: Options, base: Attention, num_layers: int, norm: Norm) -> list[Attention]:
    del norm
    # Such a file may have biases that say no, and no others.
    options.ignore("attention_bias")
    return _by_layer(options, base, options.window(_WINDOW), [_SLIDING] * num_layers)


def _qwen2(options: Options, base: Attention, num_layers: int, norm: Norm) -> list[Attention]:
    del norm
    # Whatever it says, queries, keys and values have biases.
    options.ignore("attention_bias")
    return _after_first(options, dataclasses.replace(base, has_qkv_bias=True), num_layers)


def _qwen3(options: Options, base: Attention, num_layers: int, norm: Norm) -> list[Attention]:
    has_bias = options.flag("attention_bias", False)
    mixer = dataclasses.replace(base, has_qkv_bias=has_bias, has_out_bias=has_bias, head_norm=norm)
    return _after_first(options, mixer, num_layers)


def _smollm3(options: Options, base: Attention, num_layers: int, norm: Norm) -> list[Attention]:
    del norm
    has_bias = options.flag("attention_bias", False)
    every = options.whole("no_rope_layer_interval", 4)
    # Despite its name, 1 is where rotary positions are used.
    rotated = options.take("no_rope_layers", [int((i + 1) % every != 0) for i in range(num_layers)])
    if not isinstance(rotated, list | tuple) or len(rotated) != num_layers or any(i not in (0, 1) for i in rotated):
        raise options.wrong("no_rope_layers", rotated, f"a list of 0 or 1 for each of {num_layers} layers")
    # Written by whoever copied a configuration of Qwen, and read by nobody.
    options.ignore("max_window_layers")
    window = _switched_window(options)
    mixer = dataclasses.replace(base, has_qkv_bias=has_bias, has_out_bias=has_bias)
    mixers = _by_layer(options, mixer, window, [_FULL if is_rotated else _SLIDING for is_rotated in rotated])
    return [
        mixer if is_rotated else dataclasses.replace(mixer, rope=None)
        for mixer, is_rotated in zip(mixers, rotated, strict=True)
    ]


def _after_first(options: Options, mixer: Attention, num_layers: int) -> list[Attention]:
    """Returns sliding attention where `use_sliding_window` says so: from `max_window_layers` on by default."""
    window = _switched_window(options, _WINDOW)
    first = options.whole("max_window_layers", 28, least=0)
    return _by_layer(options, mixer, window, [_SLIDING if i >= first else _FULL for i in range(num_layers)])


def _switched_window(options: Options, default: int | None = None) -> int | None:
    """Returns the window, which files also have beside a switch that leaves it unused."""
    window = options.window(default)
    return window if options.flag("use_sliding_window", False) else None


def _by_layer(options: Options, mixer: Attention, window: int | None, default: list[str]) -> list[Attention]:
    """Returns sliding attention where the layer's type says so; none slides by default if there is no window."""
    num_layers = len(default)
    kinds = options.words("layer_types", default if window else [_FULL] * num_layers, num_layers, _FULL, _SLIDING)
    if window is None:
        if _SLIDING in kinds:
            raise options.fault(f"has `{_SLIDING}` in `layer_types`, but no window is used")
        return [mixer] * num_layers
    sliding = dataclasses.replace(mixer, window=window, ring=ring_rows(window))
    return [sliding if kind == _SLIDING else mixer for kind in kinds]


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a llama-like file."""
    table = {"embed": plain("model.embed_tokens.weight"), "norm": plain("model.norm.weight")}
    if not decoder.is_tied:
        table["head"] = matrix("lm_head.weight")
    for number in range(len(decoder.layers)):
        layer, theirs = f"layers.{layer_name(number)}", f"model.layers.{number}"
        table[f"{layer}.attention_norm_in"] = plain(f"{theirs}.input_layernorm.weight")
        table[f"{layer}.mlp_norm_in"] = plain(f"{theirs}.post_attention_layernorm.weight")
        table |= prefixed(f"{layer}.attention", attention(decoder.mixer(number, "attention"), f"{theirs}.self_attn"))
        table |= prefixed(f"{layer}.mlp", mlp(decoder.mixer(number, "mlp"), f"{theirs}.mlp"))
    return table


FAMILIES = tuple(
    Family(name=name, read=_reader(vary, base=base, is_tied=is_tied), tensors=tensors, unused=("rotary_emb.inv_freq",))
    for name, vary, base, is_tied in (
        ("llama", _llama, 10_000.0, False),
        ("mistral", _mistral, 10_000.0, False),
        ("qwen2", _qwen2, 10_000.0, False),
        ("qwen3", _qwen3, 10_000.0, False),
        ("smollm3", _smollm3, 2_000_000.0, True),
    )
)

"""Gemma 3 (arXiv 2503.19786), as a text model or as the text part of one that also sees images.

State: keys and values, in a ring in most layers, in rows of the capacity in every sixth.
"""

import dataclasses

import numpy as np

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._options import Options
from statecore.models.families._rope_options import make_rope
from statecore.models.families._shapes import ring_rows
from statecore.models.families._sources import Table, attention, matrix, mlp, plain, prefixed
from statecore.models.mixers import Attention, Mlp, Norm, Rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NORMS = {
    "attention_norm_in": "input_layernorm",
    "attention_norm_out": "post_attention_layernorm",
    "mlp_norm_in": "pre_feedforward_layernorm",
    "mlp_norm_out": "post_feedforward_layernorm",
}


def read(options: Options) -> Decoder:
    """Returns the decoder of a `gemma3_text` configuration; what it leaves out is as the family's first release."""
    width, num_layers = options.whole("hidden_size", 2304), options.layers(26)
    norm = Norm(eps=options.positive("rms_norm_eps", 1e-6), offset=1.0)
    feed = Mlp(
        width=width,
        inner=options.whole("intermediate_size", 9216),
        activation=options.choice("hidden_activation", "gelu_pytorch_tanh"),
    )
    options.only("use_bidirectional_attention", False)
    # The reference reads a cap of attention scores and never applies it.
    options.ignore("attn_logit_softcapping", "cache_implementation")
    return Decoder(
        name=options.family,
        vocab_size=options.whole("vocab_size", 262_208),
        width=width,
        layers=tuple(
            (
                ("attention", Block(mixers=(("attention", mixer),), norm_in=norm, norm_out=norm)),
                ("mlp", Block(mixers=(("mlp", feed),), norm_in=norm, norm_out=norm)),
            )
            for mixer in _attentions(options, width, num_layers, norm)
        ),
        norm=norm,
        is_tied=options.flag("tie_word_embeddings", True),
        # The reference rounds it to float32 before it rounds it to the weights' dtype.
        embed_scale=float(np.float32(width**0.5)),
        logit_cap=_cap(options),
    )


def _attentions(options: Options, width: int, num_layers: int, norm: Norm) -> list[Attention]:
    """Returns the attention of each layer."""
    heads, groups = options.whole("num_attention_heads", 8), options.whole("num_key_value_heads", 4)
    if heads % groups:
        raise options.fault(f"has {heads} heads, which {groups} key-value heads cannot share evenly")
    has_bias = options.flag("attention_bias", False)
    head_size, scalar = options.whole("head_dim", 256), options.positive("query_pre_attn_scalar", 256)
    full, sliding = _ropes(options, head_size)
    base = Attention(
        width=width,
        num_heads=heads,
        num_kv_heads=groups,
        head_size=head_size,
        scale=scalar**-0.5,
        rope=full,
        head_norm=norm,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )
    window = options.window(4096)
    kinds = _kinds(options, num_layers)
    if _SLIDING not in kinds:
        return [base] * num_layers
    if window is None:
        raise options.wrong("sliding_window", window, "a whole number of at least 1")
    ring = dataclasses.replace(base, rope=sliding, window=window, ring=ring_rows(window))
    return [ring if kind == _SLIDING else base for kind in kinds]


def _kinds(options: Options, num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer: every sixth is full, if the file does not say otherwise."""
    every = options.whole("sliding_window_pattern", 6)
    # Written beside `layer_types`, and read by nobody.
    options.ignore("_sliding_window_pattern")
    default = [_SLIDING if (i + 1) % every else _FULL for i in range(num_layers)]
    return options.words("layer_types", default, num_layers, _FULL, _SLIDING)


def _ropes(options: Options, head_size: int) -> tuple[Rope, Rope]:
    """Returns the rotary positions of full and of sliding layers: a scaling without a kind is of the full ones."""
    bases = {_FULL: options.positive("rope_theta", 1e6), _SLIDING: options.positive("rope_local_base_freq", 1e4)}
    given = options.mapping("rope_parameters", {})
    unknown = [f"`{name}`" for name in sorted(given.keys() - bases.keys())]
    if unknown:
        raise options.fault(
            f"has {', '.join(unknown)} in `rope_parameters`, but one entry for each kind of layer is needed"
        )
    inner = Options(given, f"{options.family} (rope_parameters)")
    scalings = {kind: inner.mapping(kind, {}) for kind in bases}
    scalings[_FULL] = scalings[_FULL] | options.mapping("rope_scaling", {})
    full, sliding = (make_rope(options, scalings[kind], head_size, base=bases[kind]) for kind in bases)
    return full, sliding


def _cap(options: Options) -> float | None:
    is_there = options.take("final_logit_softcapping", None) is not None
    return options.positive("final_logit_softcapping") if is_there else None


def read_multimodal(options: Options) -> Decoder:
    """Returns the decoder of the text part of a `gemma3` configuration; images cannot be given to it."""
    inner = Options(options.mapping("text_config"), options.family)
    decoder = read(inner)
    inner.done()
    options.ignore("vision_config", "mm_tokens_per_image")
    options.ignore(*(f"{name}_token_{kind}" for name in ("boi", "eoi", "image") for kind in ("id", "index")))
    return dataclasses.replace(decoder, is_tied=options.flag("tie_word_embeddings", True))


def _tensors(prefix: str, decoder: Decoder) -> Table:
    table = {"embed": plain(f"{prefix}model.embed_tokens.weight"), "norm": plain(f"{prefix}model.norm.weight")}
    if not decoder.is_tied:
        table["head"] = matrix(f"{prefix}lm_head.weight")
    for number in range(len(decoder.layers)):
        layer, theirs = f"layers.{layer_name(number)}", f"{prefix}model.layers.{number}"
        table |= {f"{layer}.{ours}": plain(f"{theirs}.{norm}.weight") for ours, norm in _NORMS.items()}
        table |= prefixed(f"{layer}.attention", attention(decoder.mixer(number, "attention"), f"{theirs}.self_attn"))
        table |= prefixed(f"{layer}.mlp", mlp(decoder.mixer(number, "mlp"), f"{theirs}.mlp"))
    return table


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `gemma3_text` file."""
    return _tensors("", decoder)


def multimodal_tensors(decoder: Decoder) -> Table:
    """Returns the names of a `gemma3` file, of which the image part is left alone."""
    return _tensors("language_model.", decoder)


FAMILIES = (
    Family(name="gemma3_text", read=read, tensors=tensors),
    Family(
        name="gemma3",
        read=read_multimodal,
        tensors=multimodal_tensors,
        unused=("vision_tower.", "multi_modal_projector."),
    ),
)

"""Falcon-H1 (arXiv 2507.22448): Mamba-2 and attention side by side in every layer, an MLP, multipliers throughout.

State: of every layer both the keys and values, and the last inputs of the convolution
with the SSM's state in float32. Keys and convolution inputs hold their multipliers.
"""

import dataclasses

from statecore.models._decoder import Decoder
from statecore.models.families._family import Family
from statecore.models.families._hybrid import hybrid_layer, hybrid_tensors
from statecore.models.families._mamba_options import take_mamba, take_numbers
from statecore.models.families._options import Options
from statecore.models.families._rope_options import take_rope
from statecore.models.families._shapes import head_sizes
from statecore.models.families._sources import Table, mlp
from statecore.models.mixers import Attention, Mamba2, Mlp, Norm


def read(options: Options) -> Decoder:
    """Returns the decoder of a `falcon_h1` configuration."""
    width, eps = options.whole("hidden_size"), options.positive("rms_norm_eps", 1e-5)
    mixers = {"mamba": _mamba(options, width, eps), "attention": _attention(options, width)}
    gate_scale, out_scale = take_numbers(options, "mlp_multipliers", (1.0, 1.0))
    feed = Mlp(
        width=width,
        inner=options.whole("intermediate_size"),
        activation=options.choice("hidden_act", "silu"),
        has_bias=options.flag("mlp_bias", False),
        gate_scale=gate_scale,
        out_scale=out_scale,
    )
    options.only("attn_layer_indices", None)
    options.only("mamba_use_mlp", True)
    options.ignore("mlp_expansion_factor", "num_logits_to_keep")
    options.ignore("time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
    return Decoder(
        name="falcon_h1",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=(hybrid_layer(mixers, feed, Norm(eps=eps)),) * options.layers(),
        norm=Norm(eps=eps),
        is_tied=options.flag("tie_word_embeddings", False),
        embed_scale=options.number("embedding_multiplier", 1.0),
        logit_scale=options.number("lm_head_multiplier", 1.0),
    )


def _mamba(options: Options, width: int, eps: float) -> Mamba2:
    inner = None if options.take("mamba_d_ssm", None) is None else options.whole("mamba_d_ssm")
    order = "norm_first" if options.flag("mamba_norm_before_gate", True) else "gate_first"
    return dataclasses.replace(
        take_mamba(options, width, eps=eps, inner=inner),
        norm=order if options.flag("mamba_rms_norm", False) else None,
        # Despite its name, this touches the output of Mamba-2 alone.
        has_out_bias=options.flag("projectors_bias", False),
        scales=take_numbers(options, "ssm_multipliers", (1.0,) * 5),
        in_scale=options.number("ssm_in_multiplier", 1.0),
        out_scale=options.number("ssm_out_multiplier", 1.0),
    )


def _attention(options: Options, width: int) -> Attention:
    heads, has_bias = head_sizes(options, width), options.flag("attention_bias", False)
    return Attention(
        width=width,
        rope=take_rope(options, heads["head_size"]),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        key_scale=options.number("key_multiplier", 1.0),
        in_scale=options.number("attention_in_multiplier", 1.0),
        out_scale=options.number("attention_out_multiplier", 1.0),
        **heads,
    )


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `falcon_h1` file."""
    return hybrid_tensors(
        decoder,
        norm="final_layernorm",
        feed_norm="pre_ff_layernorm",
        feed=lambda mixer, layer: mlp(mixer, f"{layer}.feed_forward"),
    )


FAMILIES = (Family(name="falcon_h1", read=read, tensors=tensors, unused=("rotary_emb.inv_freq",)),)

"""Mamba-2 (arXiv 2405.21060): an SSM in every layer, and no MLP.

State: the last inputs of each layer's convolution, and its SSM's state in float32.
"""

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._mamba_options import check_mamba, step_limit
from statecore.models.families._options import MOST, Options
from statecore.models.families._shapes import chunk_length
from statecore.models.families._sources import Table, mamba2, matrix, plain, prefixed
from statecore.models.mixers import Mamba2, Norm


def read(options: Options) -> Decoder:
    """Returns the decoder of a `mamba2` configuration."""
    width, eps = options.whole("hidden_size"), options.positive("layer_norm_epsilon", 1e-5)
    heads, head_size = options.whole("num_heads", 128), options.whole("head_dim", 64)
    if heads * head_size != int(min(options.positive("expand", 2) * width, MOST)):
        raise options.fault(f"has {heads} heads of {head_size}, which is not `expand` times the width of {width}")
    has_bias = options.flag("use_bias", False)
    mixer = Mamba2(
        width=width,
        num_heads=heads,
        head_size=head_size,
        state_size=options.whole("state_size", 128),
        num_groups=options.whole("n_groups", 8),
        num_taps=options.whole("conv_kernel", 4),
        chunk=chunk_length(options, "chunk_size", 256),
        eps=eps,
        step_limit=step_limit(options, "time_step_limit"),
        has_conv_bias=options.flag("use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
    )
    check_mamba(options, mixer)
    options.choice("hidden_act", "silu", "swish")
    options.only("rms_norm", True)
    options.only("norm_before_gate", False)
    options.ignore("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
    return Decoder(
        name="mamba2",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=((("mixer", Block(mixers=(("mamba", mixer),), norm_in=Norm(eps=eps))),),) * options.layers(),
        norm=Norm(eps=eps),
        is_tied=options.flag("tie_word_embeddings", False),
        is_residual_float32=options.flag("residual_in_fp32", True),
    )


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `mamba2` file."""
    table = {"embed": plain("backbone.embeddings.weight"), "norm": plain("backbone.norm_f.weight")}
    if not decoder.is_tied:
        table["head"] = matrix("lm_head.weight")
    for number in range(len(decoder.layers)):
        layer, theirs = f"layers.{layer_name(number)}", f"backbone.layers.{number}"
        table[f"{layer}.mixer_norm_in"] = plain(f"{theirs}.norm.weight")
        table |= prefixed(f"{layer}.mamba", mamba2(decoder.mixer(number, "mamba"), f"{theirs}.mixer"))
    return table


FAMILIES = (Family(name="mamba2", read=read, tensors=tensors),)

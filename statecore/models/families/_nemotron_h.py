"""Nemotron-H (arXiv 2504.03624): each layer is Mamba-2, attention without positions, an MLP, or a mixture of experts.

State: of Mamba-2 layers the last inputs of the convolution and the SSM's state in
float32; of attention layers keys and values; of the others nothing.
"""

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._mamba_options import check_mamba
from statecore.models.families._options import Options
from statecore.models.families._shapes import chunk_length, head_sizes, router_sizes
from statecore.models.families._sources import Table, attention, mamba2, matrix, mlp, moe, plain, prefixed
from statecore.models.mixers import Attention, Mamba2, Mixer, Mlp, Moe, Norm

# What a layer is by `hybrid_override_pattern`, by `layers_block_type`, and by its older words.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def read(options: Options) -> Decoder:
    """Returns the decoder of a `nemotron_h` configuration."""
    width, eps = options.whole("hidden_size"), options.positive("layer_norm_epsilon", 1e-5)
    options.only("norm_eps", eps)
    kinds = _kinds(options)
    mixers: dict[str, Mixer] = {
        "linear_attention": _mamba(options, width),
        "full_attention": _attention(options, width),
        "mlp": _mlp(options, width, options.whole("intermediate_size", 21504)),
    }
    if "moe" in kinds:
        mixers["moe"] = _moe(options, width)
    norm = Norm(eps=eps, is_float32=True)
    _take_rest(options)
    return Decoder(
        name="nemotron_h",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=tuple((("mixer", Block(mixers=((_NAMES[kind], mixers[kind]),), norm_in=norm)),) for kind in kinds),
        norm=norm,
    )


_NAMES = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp", "moe": "moe"}


def _kinds(options: Options) -> tuple[str, ...]:
    """Returns what each layer is; their number follows from the list."""
    pattern = options.take("hybrid_override_pattern", None)
    name = "layer_types" if options.take("layers_block_type", None) is None else "layers_block_type"
    options.ignore("layer_types")
    listed = options.take(name, None)
    if listed is None and pattern is None:
        raise options.fault("has neither `layers_block_type` nor `hybrid_override_pattern`, which say what layers are")
    if listed is None:
        return _of_pattern(options, pattern)
    if not isinstance(listed, list | tuple) or not listed:
        raise options.wrong(name, listed, "a list of what each layer is")
    num_layers = options.layers(len(listed))
    kinds = options.words(name, None, num_layers, *_LETTERS.values(), *_OLD_KINDS)
    return tuple(_OLD_KINDS.get(kind, kind) for kind in kinds)


def _of_pattern(options: Options, pattern: str) -> tuple[str, ...]:
    if not isinstance(pattern, str) or not pattern or set(pattern) - _LETTERS.keys():
        raise options.wrong("hybrid_override_pattern", pattern, f"a word of the letters {''.join(_LETTERS)}")
    num_layers = options.layers(len(pattern))
    if num_layers != len(pattern):
        raise options.fault(
            f"has `hybrid_override_pattern` for {len(pattern)} layers, but `num_hidden_layers` = {num_layers}"
        )
    return tuple(_LETTERS[letter] for letter in pattern)


def _mamba(options: Options, width: int) -> Mamba2:
    has_bias = options.flag("use_bias", False)
    options.choice("mamba_hidden_act", "silu", "swish")
    options.only("mamba_ssm_cache_dtype", "float32")
    name = _either(options, "time_step_min", "mamba_dt_min")
    least = options.number(name, 0.001)
    if least < 0:
        raise options.wrong(name, least, "a number of at least 0")
    mixer = Mamba2(
        width=width,
        num_heads=options.whole("mamba_num_heads", 128),
        head_size=options.whole("mamba_head_dim", 64),
        state_size=options.whole("ssm_state_size", 128),
        num_groups=options.whole(_either(options, "n_groups", "mamba_n_groups"), 8),
        num_taps=options.whole(_either(options, "conv_kernel", "mamba_d_conv"), 4),
        chunk=chunk_length(options, _either(options, "chunk_size", "mamba_chunk_size"), 128),
        eps=options.positive("layer_norm_epsilon", 1e-5),
        # The reference clamps to this, and not to `time_step_limit`.
        step_limit=(least, float("inf")),
        has_conv_bias=options.flag(_either(options, "use_conv_bias", "mamba_conv_bias"), True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
    )
    check_mamba(options, mixer)
    return mixer


def _either(options: Options, name: str, old: str) -> str:
    """Returns the one of two names that the configuration uses; the older wins, as in the reference."""
    options.ignore(name)
    return name if options.take(old, None) is None else old


def _attention(options: Options, width: int) -> Attention:
    heads = head_sizes(options, width)
    heads["head_size"] = options.whole("head_dim", options.take("attention_head_dim", 128))
    options.only("attention_bias", False)
    options.only("sliding_window", None)
    return Attention(width=width, **heads)


def _mlp(options: Options, width: int, inner: int) -> Mlp:
    return Mlp(
        width=width,
        inner=inner,
        activation=options.choice("mlp_hidden_act", "relu2"),
        is_gated=False,
        has_bias=options.flag("mlp_bias", False),
    )


def _moe(options: Options, width: int) -> Moe:
    shared = _mlp(options, width, options.whole("moe_shared_expert_intermediate_size", 7688))
    latent = options.take("moe_latent_size", None)
    return Moe(
        width=width,
        inner=options.whole("moe_intermediate_size", 7688),
        activation=shared.activation,
        is_gated=False,
        shared=shared,
        latent=None if latent is None else options.whole("moe_latent_size"),
        has_latent_bias=shared.has_bias,
        **router_sizes(options),
    )


def _take_rest(options: Options) -> None:
    """Takes what changes nothing: initial values, training, prediction of more tokens, positions that are not used."""
    options.only("tie_word_embeddings", False)
    options.only("residual_in_fp32", False)
    options.ignore("expand", "mamba_expand", "mamba_proj_bias", "num_logits_to_keep", "rescale_prenorm_residual")
    options.ignore("mamba_dt_init_floor", "mamba_dt_limit", "mamba_dt_max", "use_mamba_kernels")
    options.ignore("time_step_floor", "time_step_limit", "time_step_max", "time_step_rank")
    options.ignore("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_nextn_predict_layers")
    options.ignore("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta")
    # Written whether or not there are experts.
    options.ignore("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size")
    options.ignore("moe_shared_expert_overlap", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob")
    options.ignore("num_experts_per_tok", "routed_scaling_factor", "topk_group")


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `nemotron_h` file."""
    table = {
        "embed": plain("backbone.embeddings.weight"),
        "norm": plain("backbone.norm_f.weight"),
        "head": matrix("lm_head.weight"),
    }
    for number in range(len(decoder.layers)):
        layer, theirs = f"layers.{layer_name(number)}", f"backbone.layers.{number}"
        table[f"{layer}.mixer_norm_in"] = plain(f"{theirs}.norm.weight")
        ((name, mixer),) = dict(decoder.layers[number])["mixer"].mixers
        table |= prefixed(f"{layer}.{name}", _mixer_tensors(mixer, f"{theirs}.mixer"))
    return table


def _mixer_tensors(mixer: Mixer, prefix: str) -> Table:
    if isinstance(mixer, Mamba2):
        return mamba2(mixer, prefix)
    if isinstance(mixer, Attention):
        return attention(mixer, prefix)
    if isinstance(mixer, Moe):
        return moe(mixer, prefix)
    assert isinstance(mixer, Mlp)
    return mlp(mixer, prefix)


FAMILIES = (Family(name="nemotron_h", read=read, tensors=tensors, unused=("mtp.",)),)

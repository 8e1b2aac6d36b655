"""Granite 4 hybrid (`granitemoehybrid`): Mamba-2 or attention in each layer, then an MLP or experts; multipliers.

State: of Mamba-2 layers the last inputs of the convolution and the SSM's state in
float32; of attention layers keys and values.
"""

from statecore.models._decoder import Decoder
from statecore.models.families._family import Family
from statecore.models.families._hybrid import hybrid_layer, hybrid_tensors
from statecore.models.families._mamba_options import take_mamba
from statecore.models.families._options import Options
from statecore.models.families._rope_options import take_rope
from statecore.models.families._shapes import head_sizes
from statecore.models.families._sources import Source, Table, matrix
from statecore.models.mixers import Attention, Mixer, Mlp, Moe, Norm, Rope

# The words of transformers 4, and what they are called now.
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def read(options: Options) -> Decoder:
    """Returns the decoder of a `granitemoehybrid` configuration."""
    width, eps = options.whole("hidden_size"), options.positive("rms_norm_eps", 1e-6)
    mixers: dict[str, Mixer] = {
        "linear_attention": take_mamba(options, width, eps=eps),
        "full_attention": _attention(options, width),
    }
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    feed = _feed(options, width)
    options.only("normalization_function", "rmsnorm")
    options.ignore("init_method")
    scale = options.number("residual_multiplier", 1.0)
    return Decoder(
        name="granitemoehybrid",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=tuple(
            hybrid_layer({names[kind]: mixers[kind]}, feed, Norm(eps=eps), scale=scale) for kind in _kinds(options)
        ),
        norm=Norm(eps=eps),
        is_tied=options.flag("tie_word_embeddings", False),
        embed_scale=options.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / options.positive("logits_scaling", 1.0),
    )


def _feed(options: Options, width: int) -> Mlp | Moe:
    """Returns the MLP of a dense model, or experts of which that MLP is the shared one."""
    shared = Mlp(
        width=width,
        inner=options.whole("shared_intermediate_size", 1024),
        activation=options.choice("hidden_act", "silu"),
    )
    num_experts = options.experts("num_local_experts", 8, least=0)
    if not num_experts:
        options.ignore("intermediate_size", "num_experts_per_tok")
        return shared
    num_chosen = options.whole("num_experts_per_tok", 2)
    if num_chosen > num_experts:
        raise options.fault(f"has `num_experts_per_tok` = {num_chosen}, but {num_experts} experts to choose from")
    return Moe(
        width=width,
        inner=options.whole("intermediate_size", 11008),
        num_experts=num_experts,
        num_chosen=num_chosen,
        activation=shared.activation,
        shared=shared,
    )


def _kinds(options: Options) -> tuple[str, ...]:
    num_layers = options.layers()
    # One list under two names: whichever the file has.
    name = "layers_block_type" if options.take("layer_types", None) is None else "layer_types"
    options.ignore("layers_block_type")
    default = ["linear_attention"] * num_layers
    kinds = options.words(name, default, num_layers, "linear_attention", "full_attention", *_OLD_KINDS)
    return tuple(_OLD_KINDS.get(kind, kind) for kind in kinds)


def _attention(options: Options, width: int) -> Attention:
    heads, has_bias = head_sizes(options, width), options.flag("attention_bias", False)
    return Attention(
        width=width,
        rope=_rope(options, heads["head_size"]),
        scale=options.number("attention_multiplier", 1.0),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        **heads,
    )


def _rope(options: Options, head_size: int) -> Rope | None:
    if options.choice("position_embedding_type", "nope", "rope") == "rope":
        return take_rope(options, head_size)
    options.ignore("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta")
    return None


def _feed_tensors(mixer: Mlp | Moe, layer: str) -> Table:
    """Returns the table of an MLP or experts, whose gate and input are one matrix in the file too."""
    if isinstance(mixer, Moe):
        experts = f"{layer}.block_sparse_moe"
        shared = {f"shared_{path}": source for path, source in _shared_tensors(layer).items()}
        return shared | {
            "router": matrix(f"{experts}.router.layer.weight"),
            "gate_up": _turned(f"{experts}.input_linear.weight"),
            "down": _turned(f"{experts}.output_linear.weight"),
        }
    return _shared_tensors(layer)


def _shared_tensors(layer: str) -> Table:
    return {
        "gate_up": matrix(f"{layer}.shared_mlp.input_linear.weight"),
        "down": matrix(f"{layer}.shared_mlp.output_linear.weight"),
    }


def _turned(name: str) -> Source:
    """Returns matrices `[E, out, in]` as `[E, in, out]`."""
    return Source(names=(name,), build=lambda xp, array: array.swapaxes(1, 2))


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `granitemoehybrid` file."""
    return hybrid_tensors(decoder, norm="norm", feed_norm="post_attention_layernorm", feed=_feed_tensors)


FAMILIES = (Family(name="granitemoehybrid", read=read, tensors=tensors, unused=("rotary_emb.inv_freq",)),)

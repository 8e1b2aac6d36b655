"""Qwen3-Next and the text part of Qwen3.5: gated delta nets, and gated attention in every fourth layer or so.

State: keys and values of the attention layers in rows of the capacity; of the others the
last inputs of each convolution, and the delta rule's matrices in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._options import Options
from statecore.models.families._rope_options import make_rope, take_scaling
from statecore.models.families._sources import Source, Table, attention, linear, matrix, mlp, moe, plain, prefixed, taps
from statecore.models.mixers import Attention, GatedDelta, Mlp, Moe, Norm, Rope

Feed = Mlp | Moe

# Of positions in images and films; those of text are equal in all three parts.
_IMAGE_ROPE = ("mrope_interleaved", "mrope_section")
_IMAGE_OPTIONS = """image_token_id language_model_only video_token_id vision_config vision_end_token_id
    vision_start_token_id""".split()


def read_next(options: Options) -> Decoder:
    """Returns the decoder of a `qwen3_next` configuration."""
    options.only("use_sliding_window", False)
    return _decoder(options, _next_feeds(options), num_kv_heads=2)


def read_text(options: Options) -> Decoder:
    """Returns the decoder of a `qwen3_5_text` configuration."""
    options.only("mlp_only_layers", [])
    options.choice("output_gate_type", "swish", "silu")
    options.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    feed = Mlp(width=options.whole("hidden_size"), inner=options.whole("intermediate_size"))
    return _decoder(options, [feed] * options.layers(), num_kv_heads=4)


def read_whole(options: Options) -> Decoder:
    """Returns the decoder of the text part of a `qwen3_5` configuration, which is of text and images."""
    inner = Options(options.mapping("text_config"), f"{options.family} (text_config)")
    inner.choice("model_type", "qwen3_5_text")
    decoder = read_text(inner)
    inner.done()
    options.ignore(*_IMAGE_OPTIONS)
    is_tied = options.flag("tie_word_embeddings", decoder.is_tied)
    if is_tied != inner.flag("tie_word_embeddings", is_tied):
        raise options.fault("has another `tie_word_embeddings` in its `text_config`")
    return dataclasses.replace(decoder, name=options.family, is_tied=is_tied)


def _decoder(options: Options, feeds: list[Feed], *, num_kv_heads: int) -> Decoder:
    width, norm = options.whole("hidden_size"), Norm(eps=options.positive("rms_norm_eps", 1e-6), offset=1.0)
    options.choice("hidden_act", "silu")
    options.only("attn_output_gate", True)
    options.only("mamba_ssm_dtype", "float32")
    mixers = {
        "linear_attention": ("delta", _delta(options, width, norm.eps)),
        "full_attention": ("attention", _attention(options, width, norm, num_kv_heads)),
    }
    return Decoder(
        name=options.family,
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=tuple(
            (
                ("mixer", Block(mixers=(mixers[kind],), norm_in=norm)),
                ("mlp", Block(mixers=(("mlp", feed),), norm_in=norm)),
            )
            for kind, feed in zip(_kinds(options, len(feeds)), feeds, strict=True)
        ),
        norm=norm,
        is_tied=options.flag("tie_word_embeddings", False),
    )


def _kinds(options: Options, num_layers: int) -> tuple[str, ...]:
    """Returns what mixes in each layer."""
    every = options.whole("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    return options.words("layer_types", default, num_layers, "linear_attention", "full_attention")


def _delta(options: Options, width: int, eps: float) -> GatedDelta:
    keys, values = options.whole("linear_num_key_heads", 16), options.whole("linear_num_value_heads", 32)
    if values % keys:
        raise options.fault(f"has {values} `linear_num_value_heads`, which {keys} key heads cannot serve evenly")
    return GatedDelta(
        width=width,
        num_key_heads=keys,
        num_value_heads=values,
        key_size=options.whole("linear_key_head_dim", 128),
        value_size=options.whole("linear_value_head_dim", 128),
        num_taps=options.whole("linear_conv_kernel_dim", 4, least=2),
        eps=eps,
    )


def _attention(options: Options, width: int, norm: Norm, num_kv_heads: int) -> Attention:
    heads, groups = options.whole("num_attention_heads"), options.whole("num_key_value_heads", num_kv_heads)
    if heads % groups:
        raise options.fault(f"has {heads} heads, which {groups} key-value heads cannot share evenly")
    head_size, has_bias = options.whole("head_dim", 256), options.flag("attention_bias", False)
    return Attention(
        width=width,
        num_heads=heads,
        num_kv_heads=groups,
        head_size=head_size,
        rope=_rope(options, head_size),
        head_norm=norm,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_gate=True,
    )


def _rope(options: Options, head_size: int) -> Rope:
    """Returns the rotary positions of a quarter of each head, if nothing else is said."""
    base = options.positive("rope_theta", 10_000.0)
    partial = options.positive("partial_rotary_factor", 0.25, most=1.0)
    given = {name: value for name, value in take_scaling(options).items() if name not in _IMAGE_ROPE}
    return make_rope(options, given, head_size, base=base, partial=partial)


def _next_feeds(options: Options) -> list[Feed]:
    """Returns the MLP or the experts of each layer of Qwen3-Next."""
    num_layers, num_experts = options.layers(), options.experts("num_experts", 512, least=0)
    every, dense = options.whole("decoder_sparse_step", 1), options.layer_numbers("mlp_only_layers", (), num_layers)
    is_sparse = [num_experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(num_layers)]
    width = options.whole("hidden_size")
    experts = _experts(options, width, num_experts) if any(is_sparse) else None
    plain_mlp = None if all(is_sparse) else Mlp(width=width, inner=options.whole("intermediate_size"))
    options.ignore(
        "intermediate_size",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
    )
    return [feed for sparse in is_sparse if (feed := experts if sparse else plain_mlp)]


def _experts(options: Options, width: int, num_experts: int) -> Moe:
    chosen = options.whole("num_experts_per_tok", 10)
    if chosen > num_experts:
        raise options.fault(f"has `num_experts_per_tok` = {chosen}, but `num_experts` = {num_experts} to choose from")
    return Moe(
        width=width,
        inner=options.whole("moe_intermediate_size", 512),
        num_experts=num_experts,
        num_chosen=chosen,
        is_normalized=options.flag("norm_topk_prob", True),
        shared=Mlp(width=width, inner=options.whole("shared_expert_intermediate_size", 512)),
        has_shared_gate=True,
    )


def _tensors(in_proj: Callable[[GatedDelta, str], Source], model: str = "model") -> Callable[[Decoder], Table]:
    """Returns the table of a file whose text model is `model`, and whose delta nets are read by `in_proj`."""

    def tensors(decoder: Decoder) -> Table:
        table = {"embed": plain(f"{model}.embed_tokens.weight"), "norm": plain(f"{model}.norm.weight")}
        if not decoder.is_tied:
            table["head"] = matrix("lm_head.weight")
        for number, (mixing, feeding) in enumerate(decoder.layers):
            layer, theirs = f"layers.{layer_name(number)}", f"{model}.layers.{number}"
            table[f"{layer}.mixer_norm_in"] = plain(f"{theirs}.input_layernorm.weight")
            table[f"{layer}.mlp_norm_in"] = plain(f"{theirs}.post_attention_layernorm.weight")
            ((name, mixer),), ((_, feed),) = mixing[1].mixers, feeding[1].mixers
            if isinstance(mixer, GatedDelta):
                source = in_proj(mixer, f"{theirs}.linear_attn")
                table |= prefixed(f"{layer}.{name}", _delta_table(f"{theirs}.linear_attn") | {"in_proj": source})
            else:
                assert isinstance(mixer, Attention)
                table |= prefixed(f"{layer}.{name}", _attention_table(mixer, f"{theirs}.self_attn"))
            table |= prefixed(f"{layer}.mlp", _feed_table(feed, f"{theirs}.mlp"))
        return table

    return tensors


def _feed_table(feed: Any, prefix: str) -> Table:
    return moe(feed, prefix, shared="shared_expert") if isinstance(feed, Moe) else mlp(feed, prefix)


def _delta_table(prefix: str) -> Table:
    """Returns the table of a gated delta net under `prefix`, but for what reads its input."""
    table = {
        "conv_weight": taps(f"{prefix}.conv1d.weight"),
        "dt_bias": plain(f"{prefix}.dt_bias"),
        "a_log": plain(f"{prefix}.A_log"),
        "norm": plain(f"{prefix}.norm.weight"),
    }
    return table | linear("out_proj", (f"{prefix}.out_proj",), has_bias=False)


def _split_in_proj(mixer: GatedDelta, prefix: str) -> Source:
    """Returns the source of `in_proj` in a file of Qwen3.5: the parts, each for itself."""
    del mixer
    return matrix(*(f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))


def _grouped_in_proj(mixer: GatedDelta, prefix: str) -> Source:
    """Returns the source of `in_proj` in a file of Qwen3-Next: for each key head its parts, `q k v z` and `b a`."""
    groups, share = mixer.num_key_heads, mixer.num_value_heads // mixer.num_key_heads
    values = share * mixer.value_size

    def build(xp: Any, qkvz: Any, ba: Any) -> Any:
        first = qkvz.reshape(groups, 2 * mixer.key_size + 2 * values, qkvz.shape[-1])
        second = ba.reshape(groups, 2 * share, ba.shape[-1])
        ends = [mixer.key_size, 2 * mixer.key_size, 2 * mixer.key_size + values]
        parts = [*xp.split(first, ends, axis=1), *xp.split(second, 2, axis=1)]
        return xp.concatenate([part.reshape(-1, part.shape[-1]) for part in parts]).T

    return Source(names=(f"{prefix}.in_proj_qkvz.weight", f"{prefix}.in_proj_ba.weight"), build=build)


def _attention_table(mixer: Attention, prefix: str) -> Table:
    """Returns the table of an attention whose `q_proj` has for each head a query and a gate."""

    def build(xp: Any, query_gate: Any, key: Any, value: Any) -> Any:
        rest = query_gate.shape[1:]
        heads = query_gate.reshape(mixer.num_heads, 2, mixer.head_size, *rest)
        query, gate = (heads[:, i].reshape(-1, *rest) for i in range(2))
        return xp.concatenate([query, key, value, gate]).T

    table = attention(mixer, prefix)
    fused = {path: source for path, source in table.items() if path.startswith("qkv_proj")}
    return table | {path: Source(names=source.names, build=build) for path, source in fused.items()}


FAMILIES = (
    Family(name="qwen3_next", read=read_next, tensors=_tensors(_grouped_in_proj), unused=("mtp.",)),
    Family(name="qwen3_5_text", read=read_text, tensors=_tensors(_split_in_proj), unused=("mtp.", "model.visual.")),
    Family(
        name="qwen3_5",
        read=read_whole,
        tensors=_tensors(_split_in_proj, "model.language_model"),
        unused=("mtp.", "model.visual."),
    ),
)

"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts in all layers but the first.

State: of each token a latent and a rotated key, in rows of the capacity.
"""

from typing import Any

import numpy as np

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._options import Options
from statecore.models.families._rope_options import take_rope
from statecore.models.families._shapes import router_sizes
from statecore.models.families._sources import Source, Table, linear, matrix, mlp, moe, plain, prefixed
from statecore.models.mixers import LatentAttention, Mlp, Moe, Norm

# What only layers of experts have.
_EXPERT_OPTIONS = """moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    routed_scaling_factor topk_group""".split()


def read(options: Options) -> Decoder:
    """Returns the decoder of a `deepseek_v3` configuration."""
    width, num_layers = options.whole("hidden_size"), options.layers()
    norm = Norm(eps=options.positive("rms_norm_eps", 1e-6))
    attend = Block(mixers=(("attention", _attention(options, width)),), norm_in=norm)
    activation = options.choice("hidden_act", "silu")
    dense = Mlp(width=width, inner=options.whole("intermediate_size"), activation=activation)
    num_dense = min(options.whole("first_k_dense_replace", 3, least=0), num_layers)
    feeds: list[Mlp | Moe] = [dense] * num_dense
    if num_dense < num_layers:
        feeds += [_experts(options, width, activation)] * (num_layers - num_dense)
    options.ignore(*_EXPERT_OPTIONS)
    options.only("moe_layer_freq", 1)
    options.choice("scoring_func", "sigmoid")
    options.choice("topk_method", "noaux_tc")
    options.ignore("aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux")
    return Decoder(
        name="deepseek_v3",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=tuple((("attention", attend), ("mlp", Block(mixers=(("mlp", feed),), norm_in=norm))) for feed in feeds),
        norm=norm,
        is_tied=options.flag("tie_word_embeddings", False),
    )


def _attention(options: Options, width: int) -> LatentAttention:
    heads, plain_size = options.whole("num_attention_heads"), options.whole("qk_nope_head_dim")
    rotated = options.whole("qk_rope_head_dim")
    if rotated % 2:
        raise options.fault(f"has `qk_rope_head_dim` = {rotated}, but pairs are rotated")
    options.only("num_key_value_heads", heads)
    options.only("head_dim", rotated)
    options.only("qk_head_dim", plain_size + rotated)
    query_latent = options.take("q_lora_rank", None)
    return LatentAttention(
        width=width,
        num_heads=heads,
        latent=options.whole("kv_lora_rank"),
        plain_size=plain_size,
        value_size=options.whole("v_head_dim"),
        rope=take_rope(options, rotated),
        query_latent=None if query_latent is None else options.whole("q_lora_rank"),
        has_bias=options.flag("attention_bias", False),
        is_interleaved=options.flag("rope_interleave", True),
    )


def _experts(options: Options, width: int, activation: str) -> Moe:
    inner = options.whole("moe_intermediate_size")
    return Moe(
        width=width,
        inner=inner,
        activation=activation,
        shared=Mlp(width=width, inner=inner * options.whole("n_shared_experts", 1), activation=activation),
        **router_sizes(options, num_groups=8, num_kept_groups=4, scale=2.5),
    )


def _halved(name: str, num_heads: int, kept: int, rotated: int) -> Source:
    """Returns a matrix turned, or a vector: of each head the last `rotated` rows are brought from pairs to halves."""

    def build(xp: Any, array: Any) -> Any:
        # First, since sizes that fit no array could ask for more indices than memory holds.
        heads = array.reshape(num_heads, kept + rotated, *array.shape[1:])
        pairs = np.arange(rotated).reshape(-1, 2)
        order = np.concatenate([np.arange(kept), kept + pairs.T.ravel()])
        return heads[:, order].reshape(array.shape).T

    return Source(names=(name,), build=build)


def _attention_table(mixer: LatentAttention, prefix: str) -> Table:
    queries = "q_proj" if mixer.query_latent is None else "q_b_proj"
    ours = "q_proj" if mixer.query_latent is None else "q_out_proj"
    table = linear(ours, (f"{prefix}.{queries}",), has_bias=False)
    if mixer.query_latent is not None:
        table |= linear("q_in_proj", (f"{prefix}.q_a_proj",), has_bias=mixer.has_bias)
        table["q_norm"] = plain(f"{prefix}.q_a_layernorm.weight")
    table |= linear("kv_in_proj", (f"{prefix}.kv_a_proj_with_mqa",), has_bias=mixer.has_bias)
    table["kv_norm"] = plain(f"{prefix}.kv_a_layernorm.weight")
    table |= linear("kv_out_proj", (f"{prefix}.kv_b_proj",), has_bias=False)
    table |= linear("out_proj", (f"{prefix}.o_proj",), has_bias=mixer.has_bias)
    if mixer.is_interleaved:
        kept = {ours: (mixer.num_heads, mixer.plain_size)}
        kept |= {name: (1, mixer.latent) for name in ("kv_in_proj", "kv_in_proj_bias") if name in table}
        for path, (heads, plain_size) in kept.items():
            table[path] = _halved(table[path].names[0], heads, plain_size, mixer.rope.dim)
    return table


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `deepseek_v3` file."""
    table = {"embed": plain("model.embed_tokens.weight"), "norm": plain("model.norm.weight")}
    if not decoder.is_tied:
        table["head"] = matrix("lm_head.weight")
    for number in range(len(decoder.layers)):
        layer, theirs = f"layers.{layer_name(number)}", f"model.layers.{number}"
        table[f"{layer}.attention_norm_in"] = plain(f"{theirs}.input_layernorm.weight")
        table[f"{layer}.mlp_norm_in"] = plain(f"{theirs}.post_attention_layernorm.weight")
        own = _attention_table(decoder.mixer(number, "attention"), f"{theirs}.self_attn")
        table |= prefixed(f"{layer}.attention", own)
        feed = decoder.mixer(number, "mlp")
        own = moe(feed, f"{theirs}.mlp") if isinstance(feed, Moe) else mlp(feed, f"{theirs}.mlp")
        table |= prefixed(f"{layer}.mlp", own)
    return table


# The released model has a layer more, which guesses a second token; the reference leaves it alone too.
_UNUSED = "model.layers.61.", "rotary_emb.inv_freq"

FAMILIES = (Family(name="deepseek_v3", read=read, tensors=tensors, unused=_UNUSED),)

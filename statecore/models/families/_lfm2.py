"""LFM2 (arXiv 2511.23404): gated short convolutions, and attention in a few layers.

State: a convolution's last inputs, or keys and values; nothing recurrent.
"""

from statecore.models._decoder import Block, Decoder, layer_name
from statecore.models.families._family import Family
from statecore.models.families._options import MOST, Options
from statecore.models.families._rope_options import take_rope
from statecore.models.families._shapes import head_sizes
from statecore.models.families._sources import Table, attention, linear, matrix, mlp, plain, prefixed, taps
from statecore.models.mixers import Attention, Mlp, Norm, ShortConv


def read(options: Options) -> Decoder:
    """Returns the decoder of an `lfm2` configuration."""
    width, num_layers = options.whole("hidden_size"), options.layers()
    norm = Norm(eps=options.positive("norm_eps", 1e-5))
    heads = head_sizes(options, width)
    rope = take_rope(options, heads["head_size"], base=1_000_000.0)
    mixers = {
        "attention": Attention(width=width, rope=rope, head_norm=norm, **heads),
        "conv": ShortConv(
            width=width,
            num_taps=options.whole("conv_L_cache", 3, least=2),
            has_bias=options.flag("conv_bias", False),
        ),
    }
    feed = Block(mixers=(("mlp", Mlp(width=width, inner=_inner(options))),), norm_in=norm)
    names = ["attention" if kind == "full_attention" else "conv" for kind in _kinds(options, num_layers)]
    _check_rest(options, width, heads["num_heads"])
    return Decoder(
        name="lfm2",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=tuple((("mixer", Block(mixers=((name, mixers[name]),), norm_in=norm)), ("mlp", feed)) for name in names),
        norm=norm,
        is_tied=options.flag("tie_embedding", options.flag("tie_word_embeddings", True)),
    )


def _kinds(options: Options, num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer: older files list those that attend, and all do if none are listed."""
    attending = options.layer_numbers("full_attn_idxs", range(num_layers), num_layers)
    default = ["full_attention" if i in attending else "conv" for i in range(num_layers)]
    return options.words("layer_types", default, num_layers, "full_attention", "conv")


def _inner(options: Options) -> int:
    """Returns the width of the MLP, which is two thirds of what the file says, times a factor, rounded up."""
    options.ignore("intermediate_size")
    given = options.whole("intermediate_size" if options.take("block_ff_dim", None) is None else "block_ff_dim")
    factor, multiple = options.positive("block_ffn_dim_multiplier", 1.0), options.whole("block_multiple_of", 256)
    if not options.flag("block_auto_adjust_ff_dim", True):
        return given
    scaled = int(min(factor * int(2 * given / 3), MOST))
    return multiple * -(-scaled // multiple)


def _check_rest(options: Options, width: int, num_heads: int) -> None:
    """Takes what older files say besides: all of it must be what the reference does anyway."""
    for name, value in {
        "block_dim": width,
        "conv_dim": width,
        "conv_dim_out": width,
        "num_heads": num_heads,
        "block_use_swiglu": True,
        "use_pos_enc": True,
    }.items():
        options.only(name, value)
    options.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    # The reference norms with `norm_eps` everywhere.
    options.ignore("block_norm_eps")


def _conv(mixer: ShortConv, prefix: str) -> Table:
    table = {"conv_weight": taps(f"{prefix}.conv.weight")}
    if mixer.has_bias:
        table["conv_bias"] = plain(f"{prefix}.conv.bias")
    table |= linear("in_proj", (f"{prefix}.in_proj",), has_bias=mixer.has_bias)
    return table | linear("out_proj", (f"{prefix}.out_proj",), has_bias=mixer.has_bias)


def tensors(decoder: Decoder) -> Table:
    """Returns the names of an `lfm2` file."""
    table = {"embed": plain("model.embed_tokens.weight"), "norm": plain("model.embedding_norm.weight")}
    if not decoder.is_tied:
        table["head"] = matrix("lm_head.weight")
    for number, _, name, mixer in decoder.mixers():
        layer, theirs = f"layers.{layer_name(number)}", f"model.layers.{number}"
        table[f"{layer}.mixer_norm_in"] = plain(f"{theirs}.operator_norm.weight")
        table[f"{layer}.mlp_norm_in"] = plain(f"{theirs}.ffn_norm.weight")
        if isinstance(mixer, Attention):
            names = "q_layernorm", "k_layernorm"
            own = attention(mixer, f"{theirs}.self_attn", out="out_proj", norms=names)
        elif isinstance(mixer, ShortConv):
            own = _conv(mixer, f"{theirs}.conv")
        else:
            own = mlp(decoder.mixer(number, "mlp"), f"{theirs}.feed_forward", gate="w1", up="w3", down="w2")
        table |= prefixed(f"{layer}.{name}", own)
    return table


FAMILIES = (Family(name="lfm2", read=read, tensors=tensors),)

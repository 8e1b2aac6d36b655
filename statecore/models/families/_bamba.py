"""Bamba: Mamba-2 in most layers, attention with half-rotated heads in a few, an MLP in each.

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
from statecore.models.families._sources import Table, mlp
from statecore.models.mixers import Attention, Mixer, Mlp, Norm


def read(options: Options) -> Decoder:
    """Returns the decoder of a `bamba` configuration."""
    width, eps = options.whole("hidden_size"), options.positive("rms_norm_eps", 1e-5)
    mamba = take_mamba(options, width, eps=eps)
    attention = _attention(options, width)
    feed = Mlp(
        width=width,
        inner=options.whole("intermediate_size"),
        activation=options.choice("hidden_act", "silu"),
        has_bias=options.flag("mlp_bias", False),
    )
    options.only("num_experts", 1)
    options.ignore("num_logits_to_keep", "z_loss_coefficient")
    num_layers = options.layers()
    attended = options.layer_numbers("attn_layer_indices", (), num_layers)
    mixers: list[dict[str, Mixer]] = [
        {"attention": attention} if number in attended else {"mamba": mamba} for number in range(num_layers)
    ]
    return Decoder(
        name="bamba",
        vocab_size=options.whole("vocab_size"),
        width=width,
        layers=tuple(hybrid_layer(mixer, feed, Norm(eps=eps)) for mixer in mixers),
        norm=Norm(eps=eps),
        is_tied=options.flag("tie_word_embeddings", False),
    )


def _attention(options: Options, width: int) -> Attention:
    heads, has_bias = head_sizes(options, width), options.flag("attention_bias", False)
    # Half of each head, whatever a top-level key says: only `rope_parameters` can say otherwise.
    options.only("partial_rotary_factor", 0.5)
    rope = take_rope(options, heads["head_size"], partial=0.5)
    options.only("attn_rotary_emb", rope.dim)
    return Attention(width=width, rope=rope, has_qkv_bias=has_bias, has_out_bias=has_bias, **heads)


def tensors(decoder: Decoder) -> Table:
    """Returns the names of a `bamba` file."""
    return hybrid_tensors(
        decoder,
        norm="final_layernorm",
        feed_norm="pre_ff_layernorm",
        feed=lambda mixer, layer: mlp(mixer, f"{layer}.feed_forward"),
    )


FAMILIES = (Family(name="bamba", read=read, tensors=tensors, unused=("rotary_emb.inv_freq",)),)

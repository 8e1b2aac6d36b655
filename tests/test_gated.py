"""Configurations of Gemma 3, LFM2 and DeepSeek-V3: what is refused, and what older files mean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FOLDER

import statecore as sc
from statecore.models._fill import check_tensors
from statecore.models._passes import _head as head
from statecore.models.families import FAMILIES
from statecore.models.files import open_folder
from statecore.models.mixers import Moe, Rope


def decoder(name, **changes):
    """Returns the decoder of a fixture's configuration with some keys changed; None takes one away."""
    changed = open_folder(FOLDER / name).config | changes
    config = {key: value for key, value in changed.items() if value is not None or key not in changes}
    return FAMILIES[config["model_type"]].decoder(config)


def multimodal(**changes):
    """Returns the decoder of a configuration that has that of a text fixture as its part."""
    text = open_folder(FOLDER / "gemma3-linear").config
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 4}} | changes
    return FAMILIES["gemma3"].decoder(config)


def fields(found):
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


GEMMA = [
    ({"hidden_activation": "gelu"}, "hidden_activation.*gelu"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"final_logit_softcapping": 0}, "final_logit_softcapping.*above 0"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping.*number"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar.*above 0"),
    ({"num_attention_heads": 3}, "3 heads, which 2 key-value heads"),
    ({"sliding_window": 0}, "sliding_window.*at least 1"),
    ({"sliding_window": "all"}, "sliding_window.*all"),
    ({"layer_types": ["full_attention"]}, "layer_types.*3 words"),
    ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' in `layer_types`"),
    ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ({"rope_parameters": {"rope_type": "default"}}, "`rope_type` in `rope_parameters`.*each kind"),
    ({"rope_parameters": "default"}, "rope_parameters.*default"),
    ({"rope_scaling": "linear"}, "rope_scaling.*linear"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rope type 'yarn'"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "rope type 'dynamic'"),
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
]
LFM2 = [
    ({"layer_types": ["conv"]}, "layer_types.*3 words"),
    ({"layer_types": ["conv", "sliding_attention", "conv"]}, "'sliding_attention' in `layer_types`"),
    ({"layer_types": None, "full_attn_idxs": [3]}, "full_attn_idxs.*0 to 2"),
    ({"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs"),
    ({"conv_L_cache": 1}, "conv_L_cache.*at least 2"),
    ({"conv_bias": 1}, "conv_bias"),
    ({"conv_dim": 64}, "conv_dim"),
    ({"block_use_swiglu": False}, "block_use_swiglu"),
    ({"use_pos_enc": False}, "use_pos_enc"),
    ({"intermediate_size": None}, "intermediate_size"),
    ({"block_multiple_of": 0}, "block_multiple_of"),
    ({"num_key_value_heads": 3}, "3 key-value heads"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ({"num_experts": 8}, "num_experts"),
]
DEEPSEEK = [
    ({"rope_parameters": {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}, "rope type 'yarn'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 40}}, "rope type 'yarn'"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor.*only 1.0"),
    ({"qk_rope_head_dim": 5, "head_dim": 5, "qk_head_dim": 13}, "qk_rope_head_dim.*pairs"),
    ({"head_dim": 8}, "head_dim.*8.*only 4"),
    ({"qk_head_dim": 16}, "qk_head_dim.*16.*only 12"),
    ({"num_key_value_heads": 2}, "num_key_value_heads.*2.*only 4"),
    ({"q_lora_rank": 0}, "q_lora_rank"),
    ({"kv_lora_rank": None}, "kv_lora_rank"),
    ({"scoring_func": "softmax"}, "scoring_func.*softmax"),
    ({"topk_method": "greedy"}, "topk_method.*greedy"),
    ({"moe_layer_freq": 2}, "moe_layer_freq.*2"),
    ({"n_group": 3}, "8 experts, of which 1 of 3 groups"),
    ({"topk_group": 3}, "8 experts, of which 3 of 2 groups"),
    ({"n_group": 8}, "8 experts, of which 1 of 8 groups"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok.*4 experts to choose"),
    ({"n_routed_experts": None}, "n_routed_experts"),
    ({"n_shared_experts": 0}, "n_shared_experts"),
    ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ({"rope_interleave": "yes"}, "rope_interleave"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]
CASES = [
    (name, *case)
    for name, cases in (("gemma3-window", GEMMA), ("lfm2-adjusted", LFM2), ("deepseek-v3-experts", DEEPSEEK))
    for case in cases
]


@pytest.mark.parametrize(("name", "changes", "named"), CASES)
def test_what_is_not_implemented_is_refused_by_name(name, changes, named):
    with pytest.raises(sc.LoadError, match=named):
        decoder(name, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": "small"}, "text_config.*small"),
        ({"text_config": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers"),
        ({"audio_config": {"hidden_size": 4}}, "audio_config"),
    ],
)
def test_a_model_of_more_than_text_is_refused_by_name(changes, named):
    with pytest.raises(sc.LoadError, match=named):
        multimodal(**changes)


def test_older_gemma3_files_mean_the_same():
    """Theta for each kind at the top, a scaling that is of full layers alone, a pattern instead of a list."""
    old = decoder(
        "gemma3-linear",
        rope_parameters=None,
        rope_theta=50_000.0,
        rope_local_base_freq=300.0,
        rope_scaling={"type": "linear", "factor": 8.0},
        layer_types=None,
        sliding_window_pattern=2,
        cache_implementation="hybrid",
    )
    new = decoder("gemma3-linear", layer_types=["sliding_attention", "full_attention"] * 2)
    assert fields(old) == fields(new)
    assert old.mixer(0, "attention").rope == Rope(dim=12, base=300.0)
    assert old.mixer(1, "attention").rope == Rope(dim=12, base=50_000.0, scaling="linear", factor=8.0)


def test_what_a_gemma3_file_leaves_out():
    """Released files of the larger models say little of their text part."""
    found = FAMILIES["gemma3"].decoder({"model_type": "gemma3", "text_config": {"num_hidden_layers": 12}})
    assert (found.vocab_size, found.width, found.is_tied, found.logit_cap) == (262_208, 2304, True, None)
    assert [mixer.window for _, block, _, mixer in found.mixers() if block == "attention"] == ([4096] * 5 + [None]) * 2
    assert found.mixer(5, "attention").rope.base == 1e6
    assert found.mixer(0, "attention").rope.base == 1e4


def test_the_text_part_of_a_gemma3_file_is_its_text_model():
    """Its tensors have a prefix, and images' are left alone."""
    text, found = decoder("gemma3-linear"), multimodal(mm_tokens_per_image=4, image_token_index=111)
    assert fields(found) | {"name": ""} == fields(text) | {"name": ""}
    names = [[source.names for source in FAMILIES[found.name].tensors(found).values()] for found in (text, found)]
    assert names[1] == [tuple(f"language_model.{name}" for name in group) for group in names[0]]
    assert not multimodal(tie_word_embeddings=False).is_tied


def test_gemma3_caps_its_logits_where_the_file_says_so():
    plain, capped = (decoder("gemma3-window", final_logit_softcapping=cap) for cap in (None, 2))
    params = {"embed": jax.random.normal(jax.random.key(0), (112, 32))}
    x = jax.random.normal(jax.random.key(1), (2, 3, 32))
    wanted = 2 * np.tanh(np.array(head(plain, params, x)) / 2)
    np.testing.assert_allclose(np.array(head(capped, params, x)), wanted, rtol=0, atol=1e-6)


def test_gemma3_scales_embeddings_in_their_dtype():
    """A width whose root bfloat16 cannot hold is rounded to it before it multiplies."""
    found = decoder("gemma3-window", hidden_size=1152)
    assert found.embed_scale == np.float32(1152**0.5)
    assert jnp.asarray(found.embed_scale, jnp.bfloat16) == 34.0


def test_older_lfm2_files_mean_the_same():
    """Those of the first release list the attending layers, and say much that is true of every model."""
    old = decoder(
        "lfm2-adjusted",
        rope_parameters=None,
        rope_theta=10_000.0,
        layer_types=None,
        full_attn_idxs=[1],
        intermediate_size=None,
        block_ff_dim=56,
        tie_word_embeddings=None,
        tie_embedding=True,
        block_dim=32,
        conv_dim=32,
        conv_dim_out=32,
        num_heads=4,
        block_use_swiglu=True,
        use_pos_enc=True,
        block_norm_eps=1e-5,
        block_mlp_init_scale=1.0,
        block_out_init_scale=1.0,
        block_use_xavier_init=True,
        conv_use_xavier_init=True,
    )
    assert fields(old) == fields(decoder("lfm2-adjusted"))


@pytest.mark.parametrize(
    ("changes", "inner"),
    [
        ({"intermediate_size": 12_288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}, 8192),
        ({"intermediate_size": 100, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5}, 112),
        ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
    ],
)
def test_the_width_of_an_lfm2_mlp(changes, inner):
    assert decoder("lfm2-adjusted", **changes).mixer(0, "mlp").inner == inner


def test_what_older_deepseek_files_say_besides():
    """Those of the released model name what the reference does anyway."""
    old = decoder(
        "deepseek-v3-experts",
        rope_parameters=None,
        rope_theta=10_000,
        head_dim=None,
        qk_head_dim=None,
        rope_interleave=None,
        aux_loss_alpha=0.001,
        ep_size=1,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        seq_aux=True,
        topk_method="noaux_tc",
    )
    assert fields(old) == fields(decoder("deepseek-v3-experts"))


def test_deepseek_has_experts_after_its_first_layers():
    found = decoder("deepseek-v3-experts", first_k_dense_replace=2)
    assert [isinstance(found.mixer(layer, "mlp"), Moe) for layer in range(3)] == [False, False, True]
    assert found.mixer(2, "mlp").shared.inner == 24
    dense = decoder("deepseek-v3-dense", n_routed_experts=None, num_experts_per_tok=None)
    assert not any(isinstance(mixer, Moe) for _, _, _, mixer in dense.mixers())


def test_pairs_are_brought_to_halves_and_nothing_else_moves():
    """Of queries in each head, of keys once, in weights and biases."""
    found = decoder("deepseek-v3-experts", attention_bias=True)
    table = FAMILIES["deepseek_v3"].tensors(found)
    rows = np.arange(48)
    built = table["layers.layer_0.attention.q_out_proj"].build(np, np.stack([rows, rows + 100], axis=1))
    head = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 9, 11]
    np.testing.assert_array_equal(built[0], np.concatenate([np.array(head) + 12 * i for i in range(4)]))
    np.testing.assert_array_equal(built[1], built[0] + 100)
    keys = [*range(16), 16, 18, 17, 19]
    for name, given in (("kv_in_proj", np.arange(20)[:, None]), ("kv_in_proj_bias", np.arange(20))):
        np.testing.assert_array_equal(table[f"layers.layer_0.attention.{name}"].build(np, given).ravel(), keys)
    halves = FAMILIES["deepseek_v3"].tensors(decoder("deepseek-v3-dense"))
    built = halves["layers.layer_0.attention.q_proj"].build(np, rows[:, None])
    np.testing.assert_array_equal(built[0], rows)


def test_a_misshapen_matrix_of_pairs_is_named(tmp_path):
    """Also where a wrong number of rows could be taken from it."""
    found = decoder("deepseek-v3-experts")
    table = FAMILIES["deepseek_v3"].tensors(found)
    path = "layers.layer_0.attention.q_out_proj"
    name = table[path].names[0]

    class Wide:
        where = "here"

        def shapes(self):
            return {name: (60, 12)}

    with pytest.raises(sc.LoadError, match=r"q_b_proj.weight \[60, 12\] cannot be"):
        check_tensors({path: (12, 48)}, {path: table[path]}, Wide(), ())


def test_a_layer_that_guesses_ahead_is_left_alone():
    """The released model's has the number after its last; any other layer too many is not."""

    class Found:
        where = "here"

        def __init__(self, *names):
            self.names = names

        def shapes(self):
            return dict.fromkeys(self.names, (1,))

    unused = FAMILIES["deepseek_v3"].unused
    check_tensors(
        {}, {}, Found("model.layers.61.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"), unused
    )
    with pytest.raises(sc.LoadError, match="model.layers.6.mlp.up_proj.weight is unexpected"):
        check_tensors({}, {}, Found("model.layers.6.mlp.up_proj.weight"), unused)

"""Qwen3-Next and Qwen3.5: what their configurations may say, and how their files' tensors are put together."""

import json

import jax
import numpy as np
import pytest
from families import FOLDER, fixture
from safetensors.numpy import load_file, save_file

import statecore as sc
from statecore.models.families import FAMILIES
from statecore.models.mixers import Attention, GatedDelta, Mlp, Moe


def config_of(name, **changes):
    return json.loads((FOLDER / name / "config.json").read_text()) | changes


NEXT, TEXT = config_of("qwen3-next-experts"), config_of("qwen3-5-untied")


def decoder_of(config):
    return FAMILIES[config["model_type"]].decoder(config)


def whole(text, **changes):
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 9} | changes


def kinds(decoder):
    return [[type(mixer) for _, block in layer for _, mixer in block.mixers] for layer in decoder.layers]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NEXT | {"hidden_act": "gelu"}, "`hidden_act` = 'gelu'"),
        (NEXT | {"linear_num_value_heads": 3}, "3 `linear_num_value_heads`, which 2 key heads"),
        (NEXT | {"linear_conv_kernel_dim": 1}, "`linear_conv_kernel_dim` = 1"),
        (NEXT | {"layer_types": ["mamba"] * 3}, "'mamba' in `layer_types`"),
        (NEXT | {"layer_types": ["full_attention"]}, "3 words are needed"),
        (NEXT | {"num_key_value_heads": 3}, "4 heads, which 3 key-value heads"),
        (NEXT | {"use_sliding_window": True}, "`use_sliding_window` = True"),
        (NEXT | {"attn_output_gate": False}, "`attn_output_gate` = False"),
        (NEXT | {"mamba_ssm_dtype": "bfloat16"}, "`mamba_ssm_dtype` = 'bfloat16'"),
        (NEXT | {"num_experts_per_tok": 5}, "`num_experts_per_tok` = 5, but `num_experts` = 4"),
        (NEXT | {"mlp_only_layers": [3]}, "`mlp_only_layers` = [3]"),
        (NEXT | {"quantization_config": {"bits": 4}}, "`quantization_config`"),
        (NEXT | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        (NEXT | {"rope_parameters": {"mrope_section": [1, 1, 0], "beta_fast": 3}}, "`beta_fast` = 3"),
        (NEXT | {"rope_parameters": {"partial_rotary_factor": 0.2}}, "rotates 3 dimensions"),
        (TEXT | {"num_experts": 4}, "`num_experts` = 4"),
        (TEXT | {"mlp_only_layers": [1]}, "`mlp_only_layers` = [1]"),
        (TEXT | {"output_gate_type": "sigmoid"}, "`output_gate_type` = 'sigmoid'"),
        (whole(None), "no `text_config`"),
        (whole([]), "`text_config` = []"),
        (whole(TEXT | {"model_type": "qwen3_5_moe_text"}), "`model_type` = 'qwen3_5_moe_text'"),
        (whole(TEXT | {"hidden_act": "relu"}), "(text_config) model has `hidden_act` = 'relu'"),
        (whole(TEXT, tie_word_embeddings=True), "another `tie_word_embeddings`"),
        (whole(TEXT, audio_config={}), "`audio_config`"),
    ],
)
def test_what_is_not_implemented_is_named(config, words):
    with pytest.raises(sc.LoadError) as refusal:
        decoder_of(config)
    assert words in str(refusal.value)


def test_layers_follow_their_configuration():
    """Every fourth attends where nothing is said; experts by interval, but for layers that are named."""
    new = {"layer_types": None, "num_hidden_layers": 4, "mlp_only_layers": None}
    assert kinds(decoder_of(NEXT | new)) == [[GatedDelta, Moe]] * 3 + [[Attention, Moe]]
    every_second = NEXT | new | {"full_attention_interval": 2, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    assert kinds(decoder_of(every_second)) == [
        [GatedDelta, Mlp],
        [Attention, Mlp],
        [GatedDelta, Mlp],
        [Attention, Moe],
    ]
    assert kinds(decoder_of(NEXT | {"num_experts": 0})) == kinds(decoder_of(config_of("qwen3-next-dense")))


def test_older_configurations_say_the_same():
    """Rotary options outside of `rope_parameters`, and what Qwen3.5's own files add."""
    rotary = NEXT["rope_parameters"]
    old = {name: value for name, value in NEXT.items() if name not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rotary["rope_theta"], "partial_rotary_factor": 0.25, "rope_scaling": None}
    old |= {"torch_dtype": "float32", "use_sliding_window": False, "full_attention_interval": 4}
    assert decoder_of(old).layers == decoder_of(NEXT).layers
    images = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    hub = TEXT | {"rope_parameters": TEXT["rope_parameters"] | images, "attn_output_gate": True}
    hub |= {"mamba_ssm_dtype": "float32", "mlp_only_layers": [], "full_attention_interval": 4}
    hub |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    assert decoder_of(hub).layers == decoder_of(TEXT).layers


def test_a_quarter_of_each_head_is_rotated_by_default():
    assert decoder_of(NEXT | {"rope_parameters": None}).mixer(1, "attention").rope.dim == 4


@pytest.mark.parametrize("name", ["qwen3-5-tied", "qwen3-5-untied"])
def test_a_model_of_text_and_images_is_read_as_its_text(tmp_path, name):
    """Under the names of its files, with its vision and its prediction of further tokens left aside."""
    tensors = load_file(FOLDER / name / "model.safetensors")
    renamed = {path.replace("model.", "model.language_model.", 1): leaf for path, leaf in tensors.items()}
    extra = {path: np.ones(3, np.float32) for path in ("model.visual.patch_embed.proj.weight", "mtp.norm.weight")}
    save_file(renamed | extra, tmp_path / "model.safetensors")
    text = config_of(name)
    is_tied = text["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(whole(text, tie_word_embeddings=is_tied)))
    model, plain = sc.load(tmp_path), fixture(name).model
    assert model.name == "qwen3_5" and model.geometry(capacity=8).planes == plain.geometry(capacity=8).planes
    assert jax.tree.structure(model.params) == jax.tree.structure(plain.params)
    for found, wanted in zip(jax.tree.leaves(model.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(wanted))


def test_the_text_says_the_dtype():
    geometry = sc.default_registry().lookup(whole(TEXT | {"dtype": "bfloat16"})).geometry(capacity=8)
    dtypes = {plane.path: str(np.dtype(plane.dtype)) for plane in geometry.planes}
    assert dtypes["hidden"] == "float32" and dtypes["conv"] == dtypes["key"] == "bfloat16"


def test_biases_are_put_where_their_columns_are():
    """Of `q_proj` each head's first half is its query, the second its gate."""
    decoder = decoder_of(TEXT | {"attention_bias": True})
    source = FAMILIES["qwen3_5_text"].tensors(decoder)["layers.layer_1.attention.qkv_proj_bias"]
    heads, size = 4, 8
    query_gate = np.arange(2 * heads * size, dtype=np.float32)
    key, value = np.full(16, -1.0, np.float32), np.full(16, -2.0, np.float32)
    bias = source.build(np, query_gate, key, value)
    assert bias.shape == decoder.mixer(1, "attention").params["qkv_proj_bias"].shape
    starts = np.arange(heads)[:, None] * 2 * size + np.arange(size)
    np.testing.assert_array_equal(bias[: heads * size], starts.ravel())
    np.testing.assert_array_equal(bias[-heads * size :], starts.ravel() + size)

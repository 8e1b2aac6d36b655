"""Configurations of the Mamba-2 hybrids: what is refused, and what older files mean."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from families import FOLDER
from flax import traverse_util

import statecore as sc
from statecore.models._fill import check_tensors
from statecore.models.families import FAMILIES
from statecore.models.files import open_folder
from statecore.models.mixers import Norm

INFINITY = float("inf")


def decoder(name, **changes):
    """Returns the decoder of a fixture's configuration with some keys changed; None takes one away."""
    changed = open_folder(FOLDER / name).config | changes
    config = {key: value for key, value in changed.items() if value is not None or key not in changes}
    return FAMILIES[config["model_type"]].decoder(config)


def fields(found):
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


GRANITE = [
    ({"num_local_experts": 4}, "num_experts_per_tok"),
    ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok.*4 experts"),
    ({"num_local_experts": -1}, "num_local_experts"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type.*alibi"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ({"normalization_function": "layernorm"}, "normalization_function.*layernorm"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types.*4 words"),
    ({"layer_types": ["conv"] * 4}, "'conv' in `layer_types`"),
    ({"layer_types": None, "layers_block_type": ["mamba"]}, "layers_block_type.*4 words"),
    ({"logits_scaling": 0}, "logits_scaling"),
    ({"residual_multiplier": "0.2"}, "residual_multiplier"),
    ({"hidden_size": None}, "hidden_size"),
    ({"mamba_n_heads": 6}, "mamba_n_heads.*64 wide"),
    ({"mamba_n_heads": 7, "mamba_d_head": "auto"}, "mamba_n_heads.*64 evenly"),
    ({"mamba_d_head": "large"}, "mamba_d_head.*large"),
    ({"mamba_n_groups": 3}, "3 groups"),
    ({"mamba_d_conv": 1}, "one tap"),
    ({"mamba_conv_bias": 1}, "mamba_conv_bias"),
    ({"time_step_limit": [0.1]}, "time_step_limit.*2 numbers"),
    ({"time_step_limit": "none"}, "time_step_limit.*2 numbers"),
    ({"time_step_limit": [True, 1.0]}, "time_step_limit.*2 numbers"),
    ({"time_step_limit": [0.4, 0.05]}, "time_step_limit.*larger"),
    ({"num_key_value_heads": 3}, "3 key-value heads"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}, "partial_rotary_factor.*only 1.0"),
    ({"attention_sinks": True}, "attention_sinks"),
]
BAMBA = [
    ({"attn_layer_indices": [3]}, "attn_layer_indices.*0 to 2"),
    ({"attn_layer_indices": [-1]}, "attn_layer_indices"),
    ({"attn_layer_indices": [True]}, "attn_layer_indices"),
    ({"attn_layer_indices": 1}, "attn_layer_indices"),
    ({"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
    ({"attn_rotary_emb": 8}, "attn_rotary_emb"),
    ({"num_experts": 4}, "num_experts"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ({"mlp_bias": "yes"}, "mlp_bias"),
    ({"mamba_expand": 3}, "96 wide"),
    ({"sliding_window": 8}, "sliding_window"),
]
FALCON = [
    ({"mlp_multipliers": [1.0]}, "mlp_multipliers.*2 numbers"),
    ({"mlp_multipliers": 0.5}, "mlp_multipliers.*2 numbers"),
    ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers.*5 numbers"),
    ({"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, "1"]}, "ssm_multipliers.*5 numbers"),
    ({"mamba_use_mlp": False}, "mamba_use_mlp"),
    ({"attn_layer_indices": [0]}, "attn_layer_indices"),
    ({"mamba_d_ssm": 40}, "40 wide"),
    ({"mamba_d_ssm": 48.5}, "mamba_d_ssm"),
    ({"mamba_rms_norm": "gated"}, "mamba_rms_norm"),
    ({"key_multiplier": [0.5]}, "key_multiplier"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
]
NEMOTRON = [
    ({"layers_block_type": None}, "hybrid_override_pattern"),
    ({"layers_block_type": ["linear_attention", "conv"]}, "'conv' in `layers_block_type`"),
    ({"layers_block_type": []}, "layers_block_type"),
    ({"layers_block_type": "M-*"}, "layers_block_type"),
    ({"layers_block_type": 5}, "layers_block_type"),
    ({"layers_block_type": None, "hybrid_override_pattern": "M-X"}, "hybrid_override_pattern.*M-X"),
    ({"layers_block_type": None, "hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    ({"layers_block_type": None, "hybrid_override_pattern": "M-*", "num_hidden_layers": 4}, "num_hidden_layers"),
    ({"num_hidden_layers": 4}, "layers_block_type.*4 words"),
    ({"attention_bias": True}, "attention_bias"),
    ({"sliding_window": 8}, "sliding_window"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"residual_in_fp32": True}, "residual_in_fp32"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act.*silu"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act.*gelu"),
    ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype"),
    ({"norm_eps": 1e-6}, "norm_eps"),
    ({"n_groups": 4}, "4 groups"),
    ({"mamba_d_conv": 1}, "one tap"),
    ({"num_attention_heads": None}, "num_attention_heads"),
    ({"moe_layer_frequency": 2}, "moe_layer_frequency"),
]
EXPERTS = [
    ({"topk_group": 3}, "3 of 2 groups"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok.*4 experts"),
    ({"n_routed_experts": 7}, "7 experts"),
    ({"moe_latent_size": 0}, "moe_latent_size"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act.*silu"),
    ({"norm_topk_prob": 1}, "norm_topk_prob"),
]
REFUSED = [
    (name, changes, message)
    for name, cases in (
        ("granite-rope", GRANITE),
        ("bamba-two-groups", BAMBA),
        ("falcon-h1-plain", FALCON),
        ("nemotron-h-dense", NEMOTRON),
        ("nemotron-h-experts", EXPERTS),
    )
    for changes, message in cases
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name, changes, message):
    with pytest.raises(sc.LoadError, match=message):
        decoder(name, **changes)


OLD_ROPE = {"rope_parameters": None, "rope_theta": 10_000, "rope_scaling": None}
OLDER = [
    ("granite-rope", {"layer_types": ["mamba", "attention", "attention", "mamba"]} | OLD_ROPE),
    (
        "granite-rope",
        {
            "layer_types": None,
            "layers_block_type": ["mamba", "attention", "attention", "mamba"],
            "mamba_d_head": "auto",
        },
    ),
    ("granite-nope", {"position_embedding_type": None, "normalization_function": "rmsnorm", "init_method": "mup"}),
    ("granite-nope", {"time_step_limit": None} | OLD_ROPE),
    ("granite-nope", {"time_step_limit": [0.0, None]}),
    ("bamba-two-groups", {"attn_rotary_emb": 4, "num_experts": 1, "mamba_d_head": "auto"} | OLD_ROPE),
    ("bamba-bias", {"partial_rotary_factor": 0.5} | OLD_ROPE),
    ("falcon-h1-plain", {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "mamba_d_head": "auto"} | OLD_ROPE),
    ("falcon-h1-gate-first", {"mamba_d_ssm": 64}),
    ("nemotron-h-dense", {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"], "num_hidden_layers": 5}),
    ("nemotron-h-dense", {"layers_block_type": None, "hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5}),
    (
        "nemotron-h-dense",
        {
            "n_groups": None,
            "mamba_n_groups": 2,
            "conv_kernel": None,
            "mamba_d_conv": 4,
            "chunk_size": None,
            "mamba_chunk_size": 8,
            "time_step_min": None,
            "mamba_dt_min": 0.06,
            "use_conv_bias": None,
            "mamba_conv_bias": True,
        },
    ),
    ("nemotron-h-experts", {"layers_block_type": None, "hybrid_override_pattern": "EM*E"}),
    ("nemotron-h-dense", {"head_dim": None, "attention_head_dim": 12, "norm_eps": 3e-3}),
]


@pytest.mark.parametrize(("name", "changes"), OLDER)
def test_older_files_mean_the_same(name, changes):
    """Names, words and layouts of transformers 4."""
    assert fields(decoder(name, **changes)) == fields(decoder(name))


def test_layers_without_a_list_are_mamba():
    for name, key in (("granite-nope", "layer_types"), ("bamba-bias", "attn_layer_indices")):
        assert set(decoder(name, **{key: None}).planes) == {"conv", "hidden"}


def test_experts_of_a_dense_model_are_not_read():
    """Nemotron-H writes their sizes always."""
    found = decoder("nemotron-h-dense", moe_latent_size=0, n_routed_experts=7, num_experts_per_tok=99)
    assert fields(found) == fields(decoder("nemotron-h-dense"))


class MoreTensors:
    """A fixture's tensors and those of a head that predicts more tokens, by their shapes alone."""

    def __init__(self, name):
        tensors = open_folder(FOLDER / name).tensors
        self.where, self._shapes = tensors.where, tensors.shapes()

    def shapes(self):
        return self._shapes | {"mtp.layers.0.norm.weight": (32,)}


def test_tensors_that_predict_more_tokens_are_left_in_the_file():
    found, family = decoder("nemotron-h-dense"), FAMILIES["nemotron_h"]
    wanted = {path: param.shape for path, param in traverse_util.flatten_dict(found.params, sep=".").items()}
    tensors = MoreTensors("nemotron-h-dense")
    check_tensors(wanted, family.tensors(found), tensors, family.unused)
    with pytest.raises(sc.LoadError, match="mtp.layers.0.norm.weight is unexpected"):
        check_tensors(wanted, family.tensors(found), tensors, ())


def test_limits_of_steps_are_read_where_each_family_has_them():
    limits = {
        name: decoder(name).mixer(layer, "mamba").step_limit
        for name, layer in (("granite-rope", 0), ("bamba-two-groups", 0), ("nemotron-h-dense", 0))
    }
    assert limits == {
        "granite-rope": (0.05, 0.4),
        "bamba-two-groups": (0.0, INFINITY),
        "nemotron-h-dense": (0.06, INFINITY),
    }


def test_both_states_of_a_layer_are_stacked_over_all_layers():
    """In Falcon-H1 no layer is of one kind."""
    planes = decoder("falcon-h1-plain").planes
    assert {name: layers for name, (_, layers) in planes.items()} == dict.fromkeys(
        ("conv", "hidden", "key", "value"), (0, 1)
    )


def test_a_norm_in_float32_rounds_once():
    """Nemotron-H multiplies the weight before it casts back; the others after."""
    x, weight = (jnp.linspace(low, 3.0, 64, dtype=jnp.bfloat16) for low in (-2.0, 0.5))
    exact = np.array(x, np.float32)
    exact = exact / np.sqrt(np.square(exact).mean() + 1e-5) * np.array(weight, np.float32)
    once = Norm(is_float32=True)(x, weight)
    assert once.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.array(once), np.array(jnp.asarray(exact, jnp.bfloat16)))
    assert not np.array_equal(np.array(once), np.array(Norm()(x, weight)))

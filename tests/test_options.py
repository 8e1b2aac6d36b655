"""Configurations of all families: nonsense is refused by name, and what is left out means what the reference means."""

import contextlib
import copy
import dataclasses
import math

import pytest
from families import FOLDER, NAMES

import statecore as sc
from statecore.models._loaders import FamilyLoader
from statecore.models.families import FAMILIES
from statecore.models.files import open_folder

HUGE = 10**400
ABSENT = object()
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 3.0}
NONSENSE = ["x", [], [[]], {"a": 1}, -1, 0, 1.5, math.nan, math.inf, HUGE, 10**5000, 2**63, True]


def paths(table, before=()):
    """Yields where each value of a configuration stands, those of its parts too."""
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


@pytest.mark.parametrize("name", sorted({name.partition("-")[0]: name for name in NAMES}.values()))
def test_any_value_of_any_option_is_read_or_refused(name):
    """Nothing but a refusal comes of a value of the wrong type, whatever it is, and none takes long."""
    config = open_folder(FOLDER / name).config
    loader = FamilyLoader(FAMILIES[config["model_type"]])
    for path in [*paths(config), ("rope_scaling",), ("text_config",), ("no_rope_layers",), ("full_attn_idxs",)]:
        for value in NONSENSE:
            changed = copy.deepcopy(config)
            part = changed
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
            with contextlib.suppress(sc.LoadError):
                loader.describe(changed)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *(("llama-gqa", {"rms_norm_eps": bad}, "`rms_norm_eps`.*is needed") for bad in (0, -1e-6, math.nan, math.inf)),
        ("llama-gqa", {"rms_norm_eps": HUGE}, "`rms_norm_eps` = a whole number of 1329 bits, but a finite number"),
        ("llama-gqa", {"rms_norm_eps": True}, "`rms_norm_eps` = True"),
        ("llama-gqa", {"num_hidden_layers": 10**11}, "`num_hidden_layers` = 100000000000.*at most 1024"),
        ("llama-gqa", {"hidden_size": 2**31}, "`hidden_size`.*at most 2147483647"),
        ("llama-gqa", {"dtype": ["float32"]}, "dtype .'float32'."),
        ("llama-gqa", {"dtype": 0}, "dtype 0"),
        ("llama-gqa", {"rope_parameters": "x"}, "`rope_parameters` = 'x'.*an object"),
        ("llama-gqa", {"rope_parameters": []}, "`rope_parameters` = ..*an object"),
        ("llama-gqa", {"rope_scaling": 3}, "`rope_scaling` = 3.*an object"),
        ("llama-gqa", {"rope_parameters": {"rope_type": ["linear"]}}, "rope type .'linear'."),
        ("llama-gqa", {"rope_parameters": {"rope_theta": 0}}, "`rope_theta` = 0.0.*above 0"),
        ("llama-gqa", {"rope_parameters": {"rope_type": "linear", "factor": math.inf}}, "`factor` = inf"),
        ("llama-gqa", {"rope_parameters": {"rope_type": "linear", "factor": -2}}, "`factor` = -2.0"),
        ("llama-gqa", {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "`low_freq_factor` = 4.0.*less than"),
        ("llama-gqa", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` = 0.5"),
        ("llama-gqa", {f"magic_{i}": i for i in range(99)}, "`magic_0` = 0, .* and 79 more"),
        ("mistral-window", {"sliding_window": HUGE}, "`sliding_window`.*at most"),
        ("qwen2-window", {"layer_types": ["full_attention"] * 10**6}, "`layer_types` = .{1,200} words are needed"),
        ("smollm3-window", {"no_rope_layers": 1}, "`no_rope_layers` = 1"),
        ("smollm3-window", {"no_rope_layers": [2, 1, 1, 1, 1, 1]}, "`no_rope_layers`.*0 or 1"),
        ("gemma3-linear", {"query_pre_attn_scalar": math.nan}, "`query_pre_attn_scalar` = nan"),
        ("gemma3-linear", {"final_logit_softcapping": math.inf}, "`final_logit_softcapping` = inf"),
        ("gemma3-linear", {"rope_parameters": {"full_attention": 3}}, "`full_attention` = 3"),
        ("deepseek-v3-experts", {"n_routed_experts": 2**30}, "`n_routed_experts`.*at most 4096"),
        ("deepseek-v3-experts", {"routed_scaling_factor": 0}, "`routed_scaling_factor`.*above 0"),
        ("deepseek-v3-experts", {"norm_topk_prob": None}, "`norm_topk_prob` = None"),
        ("qwen3-next-experts", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "`partial_rotary_factor` = 1.5"),
        ("lfm2-adjusted", {"full_attn_idxs": [[]], "layer_types": None}, "`full_attn_idxs`"),
        ("lfm2-adjusted", {"block_ffn_dim_multiplier": math.nan}, "`block_ffn_dim_multiplier` = nan"),
        ("mamba2-two-groups", {"expand": math.inf}, "`expand` = inf"),
        ("mamba2-two-groups", {"norm_before_gate": True}, "`norm_before_gate` = True"),
        ("mamba2-two-groups", {"time_step_limit": [math.nan, 1.0]}, "`time_step_limit`"),
        ("mamba2-two-groups", {"time_step_limit": [-1.0, None]}, "`time_step_limit`.*at least 0"),
        ("granite-rope", {"logits_scaling": -1}, "`logits_scaling`.*above 0"),
        ("granite-rope", {"embedding_multiplier": math.nan}, "`embedding_multiplier` = nan"),
        ("bamba-bias", {"attention_bias": 1}, "`attention_bias` = 1"),
        ("nemotron-h-experts", {"attention_bias": 0}, "`attention_bias` = 0"),
        ("nemotron-h-experts", {"time_step_min": -0.1}, "`time_step_min`"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name, changes, message):
    with pytest.raises(sc.LoadError, match=message) as refusal:
        described(name, changes)
    assert len(str(refusal.value)) < 900


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-untied", {"attention_bias": False}),
        ("mistral-full", {"attention_bias": False}),
        ("mamba2-two-groups", {"norm_before_gate": False}),
        ("smollm3-nope", {"max_window_layers": 28}),
        ("llama-gqa", {"is_llama_config": True, "transformers.js_config": {}, "id2label": {}, "temperature": 0.6}),
    ],
)
def test_a_key_that_changes_nothing_is_accepted(name, changes):
    assert fields(described(name, changes)) == fields(described(name, {}))


@pytest.mark.parametrize(
    ("name", "changes", "same"),
    [
        ("smollm3-window", {"layer_types": None}, {}),
        ("smollm3-nope", {"use_sliding_window": True, "sliding_window": 6, "layer_types": None}, None),
        ("smollm3-nope", {"tie_word_embeddings": ABSENT}, {"tie_word_embeddings": True}),
        ("mistral-window", {"layer_types": ["full_attention"] * 2}, {"sliding_window": None}),
        ("mistral-window", {"layer_types": ["sliding_attention"] * 2}, {}),
        ("qwen2-window", {"layer_types": None, "max_window_layers": None}, {"layer_types": ["full_attention"] * 3}),
        ("lfm2-adjusted", {"block_ffn_dim_multiplier": None}, {"block_ffn_dim_multiplier": 1.0}),
        ("llama-gqa", {"rope_scaling": {"type": "linear", "factor": 3.0}}, {"rope_parameters": LINEAR}),
        (
            "llama-gqa",
            {"rope_parameters": LLAMA3, "max_position_embeddings": 64},
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
        ),
    ],
)
def test_what_is_left_out_is_as_in_the_reference(name, changes, same):
    """Each of these differed from transformers once."""
    if same is None:
        slides = [block.mixers[0][1].window for layer in described(name, changes).layers for _, block in layer[:1]]
        assert {6, None} == set(slides)
    else:
        assert fields(described(name, changes)) == fields(described(name, same))


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_a_window_that_is_absent_is_not_one_that_is_null(name):
    windows = {getattr(mixer, "window", None) for *_, mixer in described(name, {"sliding_window": ABSENT}).mixers()}
    assert 4096 in windows


def described(name, changes):
    """Returns the decoder of a fixture's configuration with some keys changed; its dtype is read too."""
    config = open_folder(FOLDER / name).config | changes
    config = {key: value for key, value in config.items() if value is not ABSENT}
    loader = FamilyLoader(FAMILIES[config["model_type"]])
    loader.describe(config)
    return loader.family.decoder(config)


def fields(decoder):
    return {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}

"""The configuration of a GGUF file in the words of a Hugging Face config.json."""

from typing import Any

import numpy as np

from statecore._errors import LoadError
from statecore.models.files._gguf_header import Header
from statecore.models.files._gguf_names import LAYER_NAMES
from statecore.models.files._gguf_options import Options
from statecore.models.files._gguf_rope import scaling

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# The one shape of Gemma 3 whose scale is not that of its heads: 27B.
_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN = 6


def read_config(header: Header) -> tuple[str, dict[str, Any]]:
    """Returns the architecture and the configuration.

    Raises:
      LoadError: an architecture, an option or a value that is not implemented, by its key.
    """
    architecture = header.fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in LAYER_NAMES:
        raise LoadError(
            f"{header.path} has the architecture {architecture!r}. GGUF files of these are read: "
            f"{', '.join(LAYER_NAMES)}. Others load from a Hugging Face folder."
        )
    parts = header.fields.get("split.count", 0)
    if not isinstance(parts, int) or parts not in (0, 1):
        raise LoadError(
            f"{header.path} is one of {parts} parts (split.count). Merge them with `llama-gguf-split --merge` first."
        )
    options = Options(header, architecture)
    config = {**_common(options), **_special(options)}
    options.check_all_known()
    return architecture, {key: value for key, value in config.items() if value is not None}


def _common(options: Options) -> dict[str, Any]:
    header = options.header
    for key, value in (("expert_count", 0), ("expert_used_count", 0), ("attention.causal", True)):
        options.only(key, value)
    for key in ("vocab_size", "rope.scaling.finetuned"):  # said by the tensors, and a remark
        options.get(key)
    config = {
        "model_type": options.architecture,
        "architectures": [_CLASSES[options.architecture]],
        "hidden_size": options.number("embedding_length", int),
        "intermediate_size": options.number("feed_forward_length", int),
        "num_hidden_layers": _num_layers(options),
        "num_attention_heads": options.number("attention.head_count", int),
        "rms_norm_eps": options.number("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": options.number("context_length", int),
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "attention_bias": any(name.endswith(".attn_q.bias") for name in header.tensors),
        **{f"{name}_token_id": _token_id(header, name) for name in ("bos", "eos")},
        "pad_token_id": _token_id(header, "padding"),
    }
    config["num_key_value_heads"] = options.number("attention.head_count_kv", int, config["num_attention_heads"])
    config["head_dim"] = _head_dim(options, config)
    theta = options.number("rope.freq_base", float, 10000.0)
    return {**config, "rope_theta": theta, "rope_scaling": scaling(options, theta, config["head_dim"])}


def _num_layers(options: Options) -> int:
    """Returns the number of layers, which a damaged file could make larger than memory."""
    found = options.number("block_count", int)
    if not 0 < found <= len(options.header.tensors):
        raise options.fault("block_count", f"is {found}, but the file has {len(options.header.tensors)} tensors")
    return found


def _vocab_size(header: Header) -> int:
    info = header.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise LoadError(f"{header.path} has no matrix token_embd.weight, so it is no language model.")
    return info.shape[0]


def _token_id(header: Header, name: str) -> int | None:
    token = header.fields.get(f"tokenizer.ggml.{name}_token_id")
    return token if type(token) is int else None


def _head_dim(options: Options, config: dict[str, Any]) -> int:
    rotated = options.get("rope.dimension_count")
    even = config["hidden_size"] // max(1, config["num_attention_heads"])
    default = rotated if options.architecture == "llama" and rotated is not None else even
    size = options.number("attention.key_length", int, default)
    for key in ("rope.dimension_count", "attention.value_length"):
        options.only(key, size)
    return size


def _special(options: Options) -> dict[str, Any]:
    """Returns what one architecture has beyond the others, or instead."""
    if options.architecture == "llama":
        return {"mlp_bias": any(name.endswith(".ffn_gate.bias") for name in options.header.tensors)}
    return _gemma3(options) if options.architecture == "gemma3" else {}


def _gemma3(options: Options) -> dict[str, Any]:
    layers, head_dim = _num_layers(options), options.number("attention.key_length", int)
    for key in ("rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa"):
        options.only(key, head_dim)
    width, heads = options.number("embedding_length", int), options.number("attention.head_count", int)
    window = options.number("attention.sliding_window", int)
    return {
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "rope_theta": options.number("rope.freq_base", float, 1000000.0),
        "rope_local_base_freq": options.number("rope.freq_base_swa", float, 10000.0),
        "sliding_window": window,
        "layer_types": _layer_types(options, layers),
        "final_logit_softcapping": _cap(options, "final_logit_softcapping"),
        "attn_logit_softcapping": _cap(options, "attn_logit_softcapping"),
    }


def _layer_types(options: Options, layers: int) -> list[str]:
    """Returns the kind of each layer: every sixth sees all, unless the file says which slide."""
    pattern = options.get("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if isinstance(pattern, int):
        slides = [(layer + 1) % max(1, pattern) != 0 for layer in range(layers)]
    else:
        slides = pattern.astype(bool).tolist() if isinstance(pattern, np.ndarray) else []
    if len(slides) != layers:
        raise options.fault("attention.sliding_window_pattern", f"does not say of {layers} layers which slide")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _cap(options: Options, key: str) -> float | None:
    return options.number(key, float, 0.0) or None

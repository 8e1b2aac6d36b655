"""The tensors of a GGUF file by their Hugging Face names, one table an architecture."""

from collections.abc import Mapping
from typing import Any

from statecore.models.files._gguf_header import Header
from statecore.models.files._gguf_tensors import NO_CHANGE, Change, Source

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3 = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = {
    **_QWEN3,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_NAMES = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _QWEN3, "gemma3": _GEMMA3}

# Frequencies of a scaled RoPE, which the configuration says in words.
ROPE_FACTORS = "rope_freqs.weight"


def sources(header: Header, architecture: str, config: Mapping[str, Any]) -> dict[str, Source]:
    """Returns where each Hugging Face tensor comes from.

    A tensor that the architecture does not have keeps its GGUF name, so that whoever loads
    the model can list it as unexpected.

    Args:
      header: the file's.
      architecture: one of `LAYER_NAMES`.
      config: the Hugging Face configuration, for the numbers of heads.
    """
    table = LAYER_NAMES[architecture]
    names = [name for name in header.tensors if name != ROPE_FACTORS]
    return {_name(name, table): Source(name, _change(name, architecture, config)) for name in names}


def _name(name: str, table: Mapping[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and layer.isdecimal() and part in table:
        return f"model.layers.{layer}.{table[part]}.{suffix}"
    return name


def _change(name: str, architecture: str, config: Mapping[str, Any]) -> Change:
    if architecture == "llama" and ".attn_q." in name:
        return Change(num_heads=config["num_attention_heads"])
    if architecture == "llama" and ".attn_k." in name:
        return Change(num_heads=config["num_key_value_heads"])
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return Change(added=1.0)
    return NO_CHANGE

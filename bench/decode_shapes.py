"""The models that `bench/decode.py` measures: sizes that people run, in the words of a Hugging Face config.json."""

import dataclasses
from collections.abc import Callable
from typing import Any

_ATTENTION = "full_attention"
_DELTA = "linear_attention"
# One layer in four attends, as in the published hybrids of these families.
_EVERY = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One model.

    name: for `--only` and the tables.
    family: its `model_type`.
    num_layers: of the whole model; quick_layers: of what `--quick` measures.
    config: what does not depend on the number of layers.
    by_layer: the options that do.
    decode_goal: the most that a step may take, over the same step of the reference.
    """

    name: str
    family: str
    num_layers: int
    quick_layers: int
    config: dict[str, Any]
    by_layer: Callable[[int], dict[str, Any]] = lambda num_layers: {}
    decode_goal: str = "< 1: faster"

    def full_config(self) -> dict[str, Any]:
        """Returns the configuration of the model."""
        common = {"model_type": self.family, "num_hidden_layers": self.num_layers, "dtype": "float32"}
        return common | self.config | self.by_layer(self.num_layers)

    def quick(self) -> "Shape":
        """Returns the same with few layers: it compiles in seconds, and its head weighs more than it should."""
        name = f"{self.name}, {self.quick_layers} of {self.num_layers} layers"
        return dataclasses.replace(self, name=name, num_layers=self.quick_layers)


def _attends(number: int) -> bool:
    return number % _EVERY == _EVERY - 1


def _bamba_layers(num_layers: int) -> dict[str, Any]:
    return {"attn_layer_indices": [i for i in range(num_layers) if _attends(i)]}


def _delta_layers(num_layers: int) -> dict[str, Any]:
    kinds = [_ATTENTION if _attends(i) else _DELTA for i in range(num_layers)]
    return {"layer_types": kinds, "mlp_only_layers": list(range(num_layers))}


_MAMBA2 = {
    "hidden_size": 768,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
}
_SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}
_BAMBA = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "vocab_size": 50288,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
}
_QWEN3_NEXT = {
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 50288,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="Mamba2-130M",
            family="mamba2",
            num_layers=24,
            quick_layers=6,
            config=_MAMBA2,
            decode_goal="<= 0.556: 1.8 times faster",
        ),
        Shape(name="SmolLM2-135M", family="llama", num_layers=30, quick_layers=6, config=_SMOLLM2),
        Shape(name="Bamba-130M", family="bamba", num_layers=12, quick_layers=4, config=_BAMBA, by_layer=_bamba_layers),
        Shape(
            name="Qwen3-Next-130M",
            family="qwen3_next",
            num_layers=12,
            quick_layers=4,
            config=_QWEN3_NEXT,
            by_layer=_delta_layers,
        ),
    )
}

"""Flax NNX models by family, and the embedded model."""

from statecore.models._embedded import load_tiny_hybrid as load_tiny_hybrid
from statecore.models._embedded import tiny_hybrid_backend as tiny_hybrid_backend
from statecore.models._tiny_hybrid import TinyHybrid as TinyHybrid
from statecore.models._tiny_hybrid import TinyHybridConfig as TinyHybridConfig
from statecore.models._tiny_hybrid import forward as forward
from statecore.models._tiny_hybrid import plain_params as plain_params
from statecore.models._tokenizer import ByteTokenizer as ByteTokenizer
from statecore.models._weights import load_weights as load_weights
from statecore.models._weights import save_weights as save_weights

__all__ = [
    "ByteTokenizer", "TinyHybrid", "TinyHybridConfig", "forward", "load_tiny_hybrid",
    "load_weights", "plain_params", "save_weights", "tiny_hybrid_backend",
]  # fmt: skip

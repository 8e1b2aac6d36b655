"""Flax NNX models by family, and the embedded model."""

from statecore.models._decoder import Block as Block
from statecore.models._decoder import Decoder as Decoder
from statecore.models._decoder import struct as struct
from statecore.models._embedded import load_tiny_hybrid as load_tiny_hybrid
from statecore.models._loaders import FamilyLoader as FamilyLoader
from statecore.models._loaders import default_loaders as default_loaders
from statecore.models._module import LanguageModel as LanguageModel
from statecore.models._module import forward as forward
from statecore.models._module import plain_params as plain_params
from statecore.models._padding import right_padded as right_padded
from statecore.models._planes import decoder_backend as decoder_backend
from statecore.models._planes import init_state as init_state
from statecore.models._tiny_hybrid import TinyHybridConfig as TinyHybridConfig
from statecore.models._tiny_hybrid import tiny_hybrid as tiny_hybrid
from statecore.models._tokenizer import ByteTokenizer as ByteTokenizer
from statecore.models._weights import load_weights as load_weights
from statecore.models._weights import save_weights as save_weights

__all__ = [
    "Block", "ByteTokenizer", "Decoder", "FamilyLoader", "LanguageModel", "TinyHybridConfig", "decoder_backend",
    "default_loaders", "forward", "init_state", "load_tiny_hybrid", "load_weights", "plain_params", "right_padded",
    "save_weights", "struct", "tiny_hybrid",
]  # fmt: skip

"""The embedded model with its weights, which come with the package."""

from pathlib import Path

import jax.numpy as jnp

from statecore.backend import Model
from statecore.models._decoder import struct
from statecore.models._planes import decoder_backend
from statecore.models._thin import DecoderLayers
from statecore.models._tiny_hybrid import TinyHybridConfig, tiny_hybrid
from statecore.models._tokenizer import ByteTokenizer
from statecore.models._weights import load_weights

_WEIGHTS = Path(__file__).parent / "weights" / "tiny_hybrid.safetensors"


def load_tiny_hybrid() -> Model:
    """Returns the embedded model with its trained weights, in float32.

    Raises:
      LoadError: the file of weights does not fit.
    """
    decoder = tiny_hybrid(TinyHybridConfig())
    return Model(
        name="tiny-hybrid",
        backend=decoder_backend(decoder),
        params=load_weights(_WEIGHTS, struct(decoder, jnp.float32)),
        tokenizer=ByteTokenizer(),
        layers=DecoderLayers(decoder, jnp.float32),
    )

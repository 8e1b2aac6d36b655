"""Scaled RoPE in GGUF files: said in fields, or only as the factors of the frequencies."""

import math
from typing import Any

import numpy as np

from statecore._errors import LoadError
from statecore.models.files._gguf_header import Header
from statecore.models.files._gguf_names import ROPE_FACTORS
from statecore.models.files._gguf_options import Options
from statecore.models.files._gguf_tensors import GGUFTensors, Source

# How all Llama models from 3.1 on are scaled; only the factor differs.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


def scaling(options: Options, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Returns the scaling of the frequencies as `rope_scaling` has it, or None.

    Raises:
      LoadError: it is none that is implemented.
    """
    linear, has_factors = _linear(options), ROPE_FACTORS in options.header.tensors
    if not has_factors:
        return linear
    if options.architecture != "llama" or linear is not None:
        raise LoadError(
            f"{options.header.path}: {ROPE_FACTORS} is implemented for llama alone, and without a linear "
            f"{options.architecture}.rope.scaling.type."
        )
    return _llama3(options.header, theta, head_dim)


def _linear(options: Options) -> dict[str, Any] | None:
    options.only("rope.scaling.type", "none", "linear")
    options.get("rope.scaling.original_context_length")  # these two do not depend on it
    factor = options.number("rope.scaling.factor", float, 1.0)
    if options.get("rope.scaling.type") != "linear" or factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": factor}


def _llama3(header: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the scaling of Llama 3.1 that has the factors of the file."""
    found = GGUFTensors(header, {ROPE_FACTORS: Source(ROPE_FACTORS)}).read(ROPE_FACTORS)
    factor = float(round(float(found.max(initial=1.0)), 4))
    wanted = llama3_factors(theta, head_dim, factor)
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4):
        raise LoadError(
            f"{header.path}: {ROPE_FACTORS} scales the frequencies in a way that is not implemented. Those of "
            f"Llama 3.1 and later are (low_freq_factor {_LOW}, high_freq_factor {_HIGH}, {_ORIGINAL} positions)."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Returns by what Llama 3.1 divides each frequency, `[D / 2]`."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_ORIGINAL / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

"""Weights of the embedded models as safetensors, one tensor a parameter."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from safetensors.flax import load_file, save_file

from statecore._errors import LoadError


def save_weights(path: Path, params: dict) -> None:
    """Writes the parameters under their dotted names, in the dtypes they have."""
    save_file(_by_name(params), str(path))


def load_weights(path: Path, like: dict) -> dict:
    """Returns the file's tensors in the structure and dtypes of `like`.

    Args:
      path: a safetensors file.
      like: shapes and dtypes, such as `jax.eval_shape` gives; a floating tensor is cast.

    Raises:
      LoadError: names every tensor that is missing, unexpected or misshapen.
    """
    found = load_file(str(path))
    wanted = _by_name(like)
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} is unexpected" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name} is {list(found[name].shape)}, but the model needs {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in found and found[name].shape != leaf.shape
    ]
    if faults:
        raise LoadError(f"{path.name} does not fit the model: " + "; ".join(faults) + ".")
    cast = {name: jnp.asarray(found[name], leaf.dtype) for name, leaf in wanted.items()}
    params = traverse_util.unflatten_dict(cast, sep=".")
    return jax.tree.map(lambda _, leaf: leaf, like, params)


def _by_name(params: dict) -> dict[str, Any]:
    """Returns the leaves by their dotted names."""
    return dict(traverse_util.flatten_dict(params, sep="."))

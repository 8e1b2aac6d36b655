"""A folder of random weights that `sc.load` takes, written without the reference.

The tensors have the names of the family's table, and any shapes that the table puts
together to the right parameters: the cuts between fused ones may lie elsewhere than in a
published file, which loads and runs the same.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from statecore.models.families import FAMILIES, Source

Shapes = list[tuple[int, ...]]

# Columns of the narrow ones of matrices that are fused: keys and values of a few heads, say.
_MOST_NARROW = 256


def write_folder(config: Mapping[str, Any], folder: Path, *, seed: int = 0) -> None:
    """Writes `config.json` and `model.safetensors` of a model whose logits are near 1.

    Raises:
      NotImplementedError: the family makes a parameter in a way that is not guessed here.
    """
    family = FAMILIES[config["model_type"]]
    decoder = family.decoder(config)
    table = family.tensors(decoder)
    wanted: dict[str, Any] = dict(traverse_util.flatten_dict(decoder.params, sep="."))
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for path, source in table.items():
        for name, shape in zip(source.names, file_shapes(source, wanted[path].shape), strict=True):
            tensors[name] = _draw(rng, name, shape)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(tensors, folder / "model.safetensors")


def file_shapes(source: Source, shape: tuple[int, ...]) -> Shapes:
    """Returns shapes of the tensors of `source` that make a parameter of `shape`."""
    for shapes in _guesses(len(source.names), shape):
        if _built(source, shapes) == shape:
            return shapes
    raise NotImplementedError(f"No shapes of {', '.join(source.names)} were found that make {list(shape)}.")


def _guesses(num: int, shape: tuple[int, ...]) -> Iterator[Shapes]:
    """Yields a tensor as it is, transposed, as taps; then vectors and matrices cut along their last axis."""
    if num == 1:
        yield from ([shape], [shape[::-1]])
        if len(shape) == 2:
            yield [(shape[1], 1, shape[0])]
    widths = [part.size for part in np.array_split(np.empty(shape[-1]), num)]
    yield [(*shape[:-1], width) for width in widths]
    yield [(width, *shape[:-1][::-1]) for width in widths]
    for width in range(1, _MOST_NARROW + 1):  # a wide matrix and narrow ones
        if num > 1 and width * num < shape[-1]:
            columns = [shape[-1] - (num - 1) * width, *[width] * (num - 1)]
            yield [(column, *shape[:-1][::-1]) for column in columns]


def _built(source: Source, shapes: Shapes) -> tuple[int, ...] | None:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    try:
        return jax.eval_shape(lambda *arrays: source.build(jnp, *arrays), *structs).shape
    except (TypeError, ValueError, IndexError):
        return None


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) > 1:
        return (rng.standard_normal(shape, np.float32) / math.sqrt(math.prod(shape[1:]))).astype(np.float32)
    # Decays and step sizes as Mamba-2 starts them; norms and skips are 1.
    start = {"A_log": math.log(4.0), "dt_bias": -3.0}.get(name.rsplit(".", 1)[-1])
    return np.full(shape, (0.0 if name.endswith("bias") else 1.0) if start is None else start, np.float32)

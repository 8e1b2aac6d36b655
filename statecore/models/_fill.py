"""Parameters from the tensors of a checkpoint: all of them accounted for, then placed one by one."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import track

from statecore._errors import LoadError
from statecore.models._decoder import Decoder
from statecore.models.families import Source, Table
from statecore.models.files import Tensors

# Of a parameter's dotted path and its shape; None leaves it to JAX.
Placement = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None] | None

# The end of the name of a head.
HEAD = "lm_head.weight"
# So many are compared at a time.
_ROWS = 4096
# So many faults are listed; a file of another model has thousands.
_MOST_FAULTS = 20


def fill(
    decoder: Decoder,
    table: Table,
    tensors: Tensors,
    *,
    dtype: DTypeLike,
    sharding: Placement = None,
    unused: tuple[str, ...] = (),
    progress: bool | None = None,
) -> dict:
    """Returns the parameters of a decoder, read one by one and let go again.

    Args:
      decoder: says what is needed.
      table: where each parameter comes from.
      tensors: of the checkpoint.
      dtype: of the parameters.
      sharding: one for all, or a function of a parameter's dotted path and shape.
      unused: names of tensors that files carry and no decoder reads; see `Family`.
      progress: whether to show a bar; only on a terminal if None.

    Raises:
      LoadError: lists every tensor that is missing, unexpected or misshapen; nothing was placed.
    """
    wanted: dict[str, Any] = dict(traverse_util.flatten_dict(decoder.params, sep="."))
    assert wanted.keys() == table.keys(), wanted.keys() ^ table.keys()
    check_tensors({path: param.shape for path, param in wanted.items()}, table, tensors, unused)
    placed = {}
    for path in _shown(list(wanted), tensors.where, progress):
        source = table[path]
        array = source.build(np, *[tensors.read(name) for name in source.names])
        where = sharding(path, array.shape) if callable(sharding) else sharding
        placed[path] = _placed(array, wanted[path].dtype(dtype), where)
    return traverse_util.unflatten_dict(placed, sep=".")


def as_filed(decoder: Decoder, table: Table, tensors: Tensors) -> Decoder:
    """Returns the decoder with a head of its own if it is to be tied, but the file has another head than embedding.

    Some files tie the two in their configuration alone; the reference goes by the tensors too.

    Args:
      decoder: as its configuration says.
      table: of that decoder.
      tensors: of the checkpoint.
    """
    shapes, embed = tensors.shapes(), table["embed"].names[0]
    heads = [name for name in shapes if name.endswith(HEAD)] if decoder.is_tied and embed in shapes else []
    if not heads or (shapes[heads[0]] == shapes[embed] and _is_equal(tensors.read(heads[0]), tensors.read(embed))):
        return decoder
    return dataclasses.replace(decoder, is_tied=False)


def _is_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Returns whether two arrays of a mapped file are equal; not at once, since they are large."""
    return all(np.array_equal(left[i : i + _ROWS], right[i : i + _ROWS]) for i in range(0, len(left), _ROWS))


def check_tensors(wanted: dict[str, tuple[int, ...]], table: Table, tensors: Tensors, unused: tuple[str, ...]) -> None:
    """Checks names and shapes of a whole checkpoint, and reads none of it.

    Raises:
      LoadError: lists every tensor that is missing, unexpected or misshapen.
    """
    shapes = tensors.shapes()
    used = {name for source in table.values() for name in source.names}
    faults = [f"{name} is missing" for name in sorted(used - shapes.keys())]
    spare = [name for name in sorted(shapes.keys() - used) if not _is_unused(name, unused)]
    faults += [f"{name} is unexpected" for name in spare]
    for path, source in table.items():
        if all(name in shapes for name in source.names):
            faults += _misshapen(path, source, wanted[path], [shapes[name] for name in source.names])
    if faults:
        more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        raise LoadError(
            f"{tensors.where} does not fit its configuration: {'; '.join(faults[:_MOST_FAULTS] + more)}. Are its "
            "config.json and its tensors of one model?"
        )


def _is_unused(name: str, unused: tuple[str, ...]) -> bool:
    """Returns whether a tensor has one of these names, of which one that ends in a dot is a prefix, else a suffix."""
    return any(name.startswith(part) if part.endswith(".") else name.endswith(part) for part in unused)


def _misshapen(path: str, source: Source, needed: tuple[int, ...], found: list[tuple[int, ...]]) -> list[str]:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in found]
    try:
        if jax.eval_shape(lambda *arrays: source.build(jnp, *arrays), *structs).shape == needed:
            return []
    except (TypeError, ValueError, IndexError):
        pass  # such shapes cannot even be put together
    listed = " and ".join(f"{name} {list(shape)}" for name, shape in zip(source.names, found, strict=True))
    return [f"{listed} cannot be {path} {list(needed)}"]


def _placed(array: np.ndarray, dtype: DTypeLike, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Returns an array of JAX with a buffer of its own: the file may change, and its pages are let go."""
    owned = np.array(array, dtype=dtype, order="C")
    return jax.block_until_ready(jax.device_put(owned, sharding) if sharding is not None else jnp.asarray(owned))


def _shown(paths: list[str], where: str, progress: bool | None) -> Iterator[str]:
    # One who asks for a bar where there is no terminal gets it all the same.
    console = Console(stderr=True, force_terminal=True if progress else None)
    shown = console.is_terminal if progress is None else progress
    yield from track(paths, description=f"loading {where}", console=console, disable=not shown, transient=True)

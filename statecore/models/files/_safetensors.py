"""The tensors of a Hugging Face folder: one safetensors file, or shards named by an index."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from statecore._errors import LoadError
from statecore.models.files._json import parse_object, read_object
from statecore.models.files._tensors import map_part

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_LISTED = 10
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Several values in one byte (F4, F6) have no array that JAX could take as it is.
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where one tensor lies."""

    path: Path
    size: int
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]


class SafetensorsFolder:
    """The tensors of a folder, memory-mapped one by one."""

    def __init__(self, folder: Path):
        """Reads the headers of all files.

        Raises:
          LoadError: a file is missing or damaged, or the index and the shards disagree.
        """
        self.where = str(folder)
        self._parts: dict[str, _Part] = {}
        files, index = _files(folder)
        for path in files:
            self._add(path)
        _check_index(folder, index, self._parts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor; reads none."""
        return {name: part.shape for name, part in self._parts.items()}

    def dtypes(self) -> dict[str, np.dtype]:
        """Returns the dtype of every tensor; reads none."""
        return {name: part.dtype for name, part in self._parts.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a view of the mapped file; see `Tensors.read`."""
        part = self._parts.get(name)
        if part is None:
            raise LoadError(f"{self.where} has no tensor {name}.")
        return map_part(part.path, part.size, part.offset, part.dtype, part.shape)

    def _add(self, path: Path) -> None:
        header, start, size = _header(path)
        for name, entry in header.items():
            if name in self._parts:
                other = self._parts[name].path.name
                raise LoadError(f"{self.where} holds the tensor {name} twice: in {other} and in {path.name}.")
            offset, shape = start + entry["data_offsets"][0], tuple(entry["shape"])
            self._parts[name] = _Part(path, size, offset, _dtype(path, name, entry["dtype"]), shape)


def _dtype(path: Path, name: str, dtype: str) -> np.dtype:
    if dtype not in _DTYPES:
        raise LoadError(
            f"{path}: the tensor {name} has the dtype {dtype}, which JAX cannot take. Use weights that are not "
            f"packed or quantized; known dtypes are {', '.join(_DTYPES)}."
        )
    return np.dtype(_DTYPES[dtype])


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the entries of a file, where its data starts, and its size, once the library has found it sound."""
    from safetensors import SafetensorError, safe_open

    try:
        # Checks the header, that the tensors tile the data, and that the data are all there.
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length).decode()
    except (SafetensorError, OSError, ValueError) as error:
        raise LoadError(f"{path} is not a whole safetensors file: {error}. {_cause(path)}") from error
    header = parse_object(text, f"The header of {path}")
    header.pop("__metadata__", None)
    return header, 8 + length, path.stat().st_size


def _cause(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(24)
    except OSError:
        return "Can it be read?"
    if start.startswith(b"version https://git-lfs"):
        return "It is a Git LFS pointer, not the file itself: run `git lfs pull`."
    return "Was its download cut short?"


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the files to read and, by tensor, the file in which an index puts it."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE], {}
    if not (folder / _INDEX).is_file():
        raise LoadError(_nothing_to_read(folder))
    index = read_object(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise LoadError(f"{folder / _INDEX} must map tensors to files under `weight_map`.")
    names = list(dict.fromkeys(index.values()))
    _check_names(folder, names)
    missing = [name for name in names if not _is_file(folder / name)]
    if missing:
        raise LoadError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {_listed(missing)}. Was the download complete?"
        )
    return [folder / name for name in names], index


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than names can be
        return False


def _check_names(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise LoadError(f"{folder / _INDEX} names the file {name!r}, which lies outside the folder.")
        if path.suffix != ".safetensors":
            raise LoadError(f"{folder / _INDEX} names the file {name!r}, which is not a .safetensors file.")


def _check_index(folder: Path, index: dict[str, str], parts: dict[str, _Part]) -> None:
    absent = [name for name, file in index.items() if name not in parts or parts[name].path != folder / file]
    if absent:
        listed = _listed([f"{name} ({index[name]})" for name in absent])
        raise LoadError(
            f"{folder}: {len(absent)} tensors are not in the shard that {_INDEX} names: {listed}. "
            "Do the shards belong to another model?"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _nothing_to_read(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir())
    if shards := [name for name in found if name.endswith(".safetensors")]:
        return f"{folder} has {_listed(shards)}, but neither {_SINGLE} nor {_INDEX}, which names the shards."
    if pickles := [name for name in found if name.endswith(_PICKLES)]:
        return (
            f"{folder} has its weights only as pickle files ({_listed(pickles)}), which can run any code when they "
            "are opened, so they are not. Get the weights as safetensors, or convert them with the library that "
            "wrote them."
        )
    return f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}."

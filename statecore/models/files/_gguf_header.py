"""The header of a GGUF file: its fields, and where its tensors lie.

The reader of the `gguf` package makes an array of every token of the vocabulary, which takes seconds, and does not
end on some damaged files. The format is short: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from statecore._errors import LoadError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMS = 4
_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    name: as GGUF calls it.
    shape: slowest axis first, as NumPy has it; the file has it the other way round.
    kind: the number of its quantization in ggml.
    offset: in bytes, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says before its data.

    path: the file.
    size: its bytes.
    fields: numbers, strings, lists of strings, and arrays of numbers, by key.
    tensors: by GGUF name, in the order of the file.
    """

    path: Path
    size: int
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Returns the header of a GGUF file.

    Raises:
      LoadError: there is no such file, it is not GGUF or of a version that is not known, or
        it is cut short or damaged.
    """
    if not path.is_file():
        raise LoadError(f"There is no file {path}.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            fields, tensors = _parse(_Cursor(path, data))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise LoadError(f"{path} cannot be read as GGUF: {error}.") from error
    return Header(path, size, fields, tensors)


class _Cursor:
    """Reads values one after the other, never past the end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self.data):
            raise self.fault("its header goes on past its end. Was its download cut short?")
        self.at, start = end, self.at
        return self.data[start:end]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"the text at byte {self.at - len(raw)} is not UTF-8.") from error

    def fault(self, what: str) -> LoadError:
        return LoadError(f"{self.path} is not a sound GGUF file: {what}")


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if (magic := cursor.take(4)) != b"GGUF":
        raise cursor.fault(f"it starts with {magic!r}, not with b'GGUF'.")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise cursor.fault(f"it is {order}, but little-endian files of version 2 or 3 are read.")
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in fields:
            raise cursor.fault(f"it has the key {key} twice.")
        fields[key] = _value(cursor, cursor.number("<I"))
    found = [_tensor(cursor) for _ in range(num_tensors)]
    return fields, _placed(cursor, fields, found)


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor)
    return _numbers(cursor, kind, 1)[0].item()


def _array(cursor: _Cursor) -> list[str] | np.ndarray:
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind == _STRING:
        return [cursor.string() for _ in range(count)]
    return _numbers(cursor, kind, count)


def _numbers(cursor: _Cursor, kind: int, count: int) -> np.ndarray:
    if kind not in _SCALARS:
        raise cursor.fault(f"the value before byte {cursor.at} has the unknown type {kind}.")
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)


def _tensor(cursor: _Cursor) -> TensorInfo:
    name, num_dims = cursor.string(), cursor.number("<I")
    if num_dims > _MAX_DIMS:
        raise cursor.fault(f"the tensor {name} has {num_dims} dimensions.")
    dims = [cursor.number("<Q") for _ in range(num_dims)]
    if 0 in dims:
        raise cursor.fault(f"the tensor {name} is empty.")
    return TensorInfo(name, tuple(reversed(dims)), cursor.number("<I"), cursor.number("<Q"))


def _placed(cursor: _Cursor, fields: dict[str, Any], found: list[TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors by name, their offsets counted from the start of the file."""
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fault(f"its general.alignment is {alignment!r}, which is not a power of two.")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        if info.name in tensors:
            raise cursor.fault(f"it has the tensor {info.name} twice.")
        if info.offset % alignment:
            raise cursor.fault(f"the tensor {info.name} starts at {info.offset}, not at a multiple of {alignment}.")
        tensors[info.name] = dataclasses.replace(info, offset=start + info.offset)
    return tensors

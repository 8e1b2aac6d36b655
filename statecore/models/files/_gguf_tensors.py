"""The tensors of a GGUF file, dequantized one by one as they are read."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from statecore._errors import LoadError
from statecore.models.files._gguf_header import Header, TensorInfo
from statecore.models.files._tensors import map_part

# Dequantized at a time: what is worked on beside the result stays small.
_CHUNK_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Change:
    """What was done to a tensor when the file was made, and must be undone.

    num_heads: the rows of each head were interleaved, for another form of RoPE; 0 if not.
    added: this was added to every element.
    """

    num_heads: int = 0
    added: float = 0.0

    def undo(self, array: np.ndarray) -> np.ndarray:
        """Returns the tensor as Hugging Face has it."""
        if self.num_heads:
            pairs = array.reshape(self.num_heads, -1, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        return array - np.float32(self.added) if self.added else array


NO_CHANGE = Change()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a Hugging Face tensor comes from.

    name: of the tensor in the file.
    change: to be undone.
    """

    name: str
    change: Change = NO_CHANGE


class GGUFTensors:
    """The tensors of a file under their Hugging Face names."""

    def __init__(self, header: Header, sources: Mapping[str, Source]):
        """Checks that every tensor lies in the file and can be dequantized.

        Args:
          header: the file's.
          sources: of each Hugging Face tensor.

        Raises:
          LoadError: a tensor lies outside the file, is quantized in a way that is not known, or does not
            fit its number of heads.
        """
        self.where = str(header.path)
        self._path: Path = header.path
        self._size = header.size
        self._sources = dict(sources)
        self._stored = {name: _Stored(self.where, header.tensors[source.name]) for name, source in sources.items()}
        for name, stored in self._stored.items():
            _check_heads(self.where, stored.info, sources[name].change.num_heads)
            if stored.info.offset + stored.num_bytes > self._size:
                raise LoadError(
                    f"{self.where} has {self._size} bytes, but its tensor {sources[name].name} goes on to byte "
                    f"{stored.info.offset + stored.num_bytes}. Was its download cut short?"
                )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor; reads none."""
        return {name: stored.info.shape for name, stored in self._stored.items()}

    def dtypes(self) -> dict[str, np.dtype]:
        """Returns the dtype that `read` gives for every tensor: float32 for quantized ones."""
        return {name: self._dtype(name) for name in self._stored}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, dequantized anew at each call; see `Tensors.read`."""
        if name not in self._stored:
            raise LoadError(f"{self.where} has no tensor {name}.")
        stored, change = self._stored[name], self._sources[name].change
        mapped = map_part(self._path, self._size, stored.info.offset, stored.dtype, stored.shape)
        return change.undo(mapped if stored.is_plain else _dequantize(mapped, stored)).astype(
            self._dtype(name), copy=False
        )

    def _dtype(self, name: str) -> np.dtype:
        stored, change = self._stored[name], self._sources[name].change
        return stored.dtype if stored.is_plain and not change.added else np.dtype(np.float32)


def _check_heads(where: str, info: TensorInfo, num_heads: int) -> None:
    if num_heads and (not info.shape or info.shape[0] % (2 * num_heads)):
        raise LoadError(
            f"{where}: the tensor {info.name} is {list(info.shape)}, which cannot be split into {num_heads} heads of "
            "an even width. Do its fields belong to another model?"
        )


class _Stored:
    """How a tensor lies in the file: as an array, or as rows of quantized blocks of bytes."""

    def __init__(self, where: str, info: TensorInfo):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            self.kind = GGMLQuantizationType(info.kind)
            block, block_bytes = GGML_QUANT_SIZES[self.kind]
        except (ValueError, KeyError) as error:
            raise LoadError(
                f"{where}: the tensor {info.name} has the quantization {info.kind}, which the installed gguf "
                "package does not know. Is a newer one out?"
            ) from error
        plain = _PLAIN.get(self.kind.name)
        self.info = info
        self.is_plain = plain is not None
        self.dtype = np.dtype(np.uint8 if plain is None else plain)
        self.shape = info.shape
        if plain is None:
            self.shape = _byte_shape(where, info, block, block_bytes)
            _check_known(where, info, self.kind, block_bytes)
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize


_PLAIN = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


def _byte_shape(where: str, info: TensorInfo, block: int, block_bytes: int) -> tuple[int, ...]:
    width = info.shape[-1] if info.shape else 1
    if width % block:
        raise LoadError(f"{where}: the tensor {info.name} has rows of {width}, which are no blocks of {block}.")
    return (*info.shape[:-1], width // block * block_bytes)


def _check_known(where: str, info: TensorInfo, kind, block_bytes: int) -> None:
    if not _is_known(kind, block_bytes):
        raise LoadError(
            f"{where}: the tensor {info.name} is quantized as {kind.name}, which the gguf package cannot undo. "
            "Use a file of another quantization, such as Q8_0."
        )


@functools.cache
def _is_known(kind, block_bytes: int) -> bool:
    from gguf import dequantize

    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantize(mapped: np.ndarray, stored: _Stored) -> np.ndarray:
    from gguf import dequantize

    out = np.empty(stored.info.shape, np.float32)
    rows, out_rows = mapped.reshape(-1, mapped.shape[-1]), out.reshape(-1, out.shape[-1])
    step = max(1, _CHUNK_ELEMENTS // max(1, out.shape[-1]))
    for start in range(0, len(rows), step):
        out_rows[start : start + step] = dequantize(rows[start : start + step], stored.kind)
    return out

"""What every source of tensors offers, whatever its format."""

from pathlib import Path
from typing import Protocol

import numpy as np

from statecore._errors import LoadError


class Tensors(Protocol):
    """The tensors of a checkpoint, read one by one under their Hugging Face names.

    where: the folder or the file, for messages.
    """

    where: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor; reads none."""
        ...

    def dtypes(self) -> dict[str, np.dtype]:
        """Returns the dtype that `read` gives for every tensor; reads none."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor: a view of the mapped file where the file holds it as it is.

        Each call maps its own part of the file, so that the pages are let go with the array.
        A view may not be written to, and JAX on CPU may share its memory: copy what must
        outlive the file.

        Raises:
          LoadError: no such tensor, or the file has changed since it was opened.
        """
        ...


def map_part(path: Path, size: int, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a part of a file as a read-only array.

    Args:
      path: the file.
      size: its bytes when it was opened.
      offset: where the part starts.
      dtype: of the array.
      shape: of the array.

    Raises:
      LoadError: the file is gone, or has another size now.
    """
    try:
        if path.stat().st_size != size:
            raise LoadError(f"{path} has changed since it was opened. Open it again.")
        # A plain array: operations on a `memmap` would claim to be one too.
        return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=shape))
    except OSError as error:
        raise LoadError(f"{path} can no longer be read: {error}.") from error

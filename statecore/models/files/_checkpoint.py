"""A checkpoint: what a folder or a file says of a model, before any of it is loaded."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statecore.models.files._config import read_config
from statecore.models.files._gguf import read_gguf
from statecore.models.files._safetensors import SafetensorsFolder
from statecore.models.files._tensors import Tensors
from statecore.models.files._tokenizer import TextTokenizer
from statecore.models.files._tokenizer_folder import folder_tokenizer
from statecore.models.files._tokenizer_gguf import gguf_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A model on disk.

    where: the folder or the file.
    config: in the words of a Hugging Face config.json.
    """

    where: str
    config: dict[str, Any]
    _open_tensors: Callable[[], Tensors]
    _open_tokenizer: Callable[[], TextTokenizer | None]

    @functools.cached_property
    def tensors(self) -> Tensors:
        """The tensors; the files are looked at on first use.

        Raises:
          LoadError: a file of tensors is missing or damaged.
        """
        return self._open_tensors()

    @functools.cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer, built on first use; None if the checkpoint has none.

        Raises:
          LoadError: its files are damaged, or of a kind that is not known.
        """
        return self._open_tokenizer()


def open_folder(path: str | Path) -> Checkpoint:
    """Returns the checkpoint of a Hugging Face folder; reads its configuration only.

    Raises:
      LoadError: there is no such folder, or no sound config.json in it.
    """
    folder = Path(path)
    config = read_config(folder)
    return Checkpoint(
        where=str(folder),
        config=config,
        _open_tensors=lambda: SafetensorsFolder(folder),
        _open_tokenizer=lambda: folder_tokenizer(folder, config),
    )


def open_gguf(path: str | Path) -> Checkpoint:
    """Returns the checkpoint of a GGUF file; reads its header only.

    Raises:
      LoadError: the file is damaged, or is of a model or has an option that is not implemented.
    """
    header, config, tensors = read_gguf(Path(path))
    return Checkpoint(
        where=str(path),
        config=config,
        _open_tensors=lambda: tensors,
        _open_tokenizer=lambda: gguf_tokenizer(header),
    )

"""The configuration of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from statecore._errors import LoadError
from statecore.models.files._json import read_object


def read_config(folder: Path) -> dict[str, Any]:
    """Returns `config.json`, its infinities as floats.

    Raises:
      LoadError: there is no such folder or no such file, or it is not a JSON object.
    """
    if not folder.exists():
        raise LoadError(f"There is no folder {folder}.")
    if not folder.is_dir():
        raise LoadError(f"{folder} is a file, but a Hugging Face folder or a .gguf file is needed.")
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} has no config.json, which says what model it is. Is it a Hugging Face folder?")
    return read_object(path)

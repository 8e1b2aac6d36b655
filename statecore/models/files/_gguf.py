"""A GGUF file as what a Hugging Face folder holds: a configuration and tensors."""

from pathlib import Path
from typing import Any

from statecore.models.files._gguf_config import read_config
from statecore.models.files._gguf_header import Header, read_header
from statecore.models.files._gguf_names import sources
from statecore.models.files._gguf_tensors import GGUFTensors


def read_gguf(path: Path) -> tuple[Header, dict[str, Any], GGUFTensors]:
    """Returns the header, the configuration and the tensors of a file; dequantizes none.

    Raises:
      LoadError: the file is damaged, or is of a model or has an option that is not implemented.
    """
    header = read_header(path)
    architecture, config = read_config(header)
    return header, config, GGUFTensors(header, sources(header, architecture, config))

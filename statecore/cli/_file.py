"""Where the demo's page goes."""

import os
import tempfile
from pathlib import Path

import statecore as sc


def check_writable(path: Path) -> None:
    """Raises UnsupportedError before anything runs if no file can be written at `path`."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise sc.UnsupportedError(f"No page can be written to {path}: name a file in a folder that can be written.")


def write_page(text: str, path: Path | None) -> Path:
    """Writes the page to `path`, or to a new file for temporary files; returns where it is.

    Raises:
      UnsupportedError: it could not be written.
    """
    try:
        if path is None:
            handle, name = tempfile.mkstemp(prefix="statecore-demo-", suffix=".html")
            os.close(handle)
            path = Path(name)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise sc.UnsupportedError(f"The page could not be written: {error}.") from error
    return path.resolve()

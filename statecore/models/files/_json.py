"""JSON files that must hold an object."""

import json
import math
from pathlib import Path
from typing import Any

from statecore._errors import LoadError

_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_object(path: Path) -> dict[str, Any]:
    """Returns a file's object.

    Infinities may be plain (`Infinity`) or written as `{"__float__": "Infinity"}`.

    Raises:
      LoadError: the file cannot be read, is not JSON, holds no object, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is not UTF-8 text: {error}. Is the file whole?") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_object(text, str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Returns the object that `text` holds; see `read_object`."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except _Twice as error:
        raise LoadError(f"{where} names {error.args[0]!r} twice in one object.") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{where} is not JSON: {error}. Is the file whole?") from error
    if not isinstance(found, dict):
        raise LoadError(f"{where} must hold an object, but holds {type(found).__name__}.")
    return found


class _Twice(Exception):
    """A key stands twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> Any:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    if table.keys() == {"__float__"} and table["__float__"] in _FLOATS:
        return _FLOATS[table["__float__"]]
    return table

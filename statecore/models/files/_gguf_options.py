"""The fields of a GGUF file that describe its model: what is not understood is refused, never ignored."""

import math
from typing import Any

import numpy as np

from statecore._errors import LoadError
from statecore.models.files._gguf_header import Header

_MOST = 2**31 - 1


class Options:
    """The fields of one architecture; remembers which were asked for."""

    def __init__(self, header: Header, architecture: str):
        self.header, self.architecture = header, architecture
        self._known: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns `{architecture}.{key}`, or the default."""
        self._known.add(f"{self.architecture}.{key}")
        return self.header.fields.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, kind: type, default: float | None = None) -> Any:
        """Returns a number.

        Raises:
          LoadError: it is absent and has no default, or is something else.
        """
        value = self.get(key, default)
        if value is None:
            raise self.fault(key, "is missing, but the model cannot be built without it")
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value % 1):
            raise self.fault(key, f"is {value!r}, but one number for all layers is needed")
        if not (1 <= value <= _MOST if kind is int else math.isfinite(value)):
            wanted = f"a whole number from 1 to {_MOST}" if kind is int else "a finite number"
            raise self.fault(key, f"is {value!r}, but {wanted} is needed")
        return kind(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a field that says anything but what is implemented.

        Raises:
          LoadError: it does.
        """
        value = self.get(key, allowed[0])
        if isinstance(value, list | np.ndarray) or value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise self.fault(key, f"is {value!r}, but only {wanted} is implemented")

    def check_all_known(self) -> None:
        """Refuses a field that nobody asked for: it would change the model, and be ignored.

        Raises:
          LoadError: names every such field.
        """
        prefix = f"{self.architecture}."
        unknown = sorted(key for key in self.header.fields if key.startswith(prefix) and key not in self._known)
        if unknown:
            raise LoadError(
                f"{self.header.path} sets {', '.join(unknown)}, which is not implemented for {self.architecture}."
            )

    def fault(self, key: str, what: str) -> LoadError:
        """Returns an error about a field."""
        return LoadError(f"{self.header.path}: {self.architecture}.{key} {what}.")

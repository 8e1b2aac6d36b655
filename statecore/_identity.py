"""Marks: what something belongs to, compared by identity."""

from typing import Self


class Mark:
    """An identity. Two marks are the same only if they are one object; a copy is the same mark."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict) -> Self:
        return self

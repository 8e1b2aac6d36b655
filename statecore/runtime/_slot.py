"""A saved state of a runtime."""

import dataclasses

import numpy as np

from statecore._errors import StateConsumedError
from statecore._typing import PyTree
from statecore.backend import Identity


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """An independent saved state, and what it belongs to.

    state: the planes; nobody else holds their buffers.
    identity: the load and weights that made it.
    lengths: `[B]` int64 on the host, what the position plane holds.
    """

    state: PyTree
    identity: Identity
    lengths: np.ndarray
    _consumed: list[bool] = dataclasses.field(default_factory=lambda: [False], repr=False)

    @property
    def is_consumed(self) -> bool:
        """Whether the slot was exchanged, so that its state is installed elsewhere."""
        return self._consumed[0]

    def consume(self) -> None:
        """Marks the slot as exchanged; every later use raises StateConsumedError."""
        self.check_usable()
        self._consumed[0] = True

    def check_usable(self) -> None:
        """Raises StateConsumedError if the slot was exchanged."""
        if self.is_consumed:
            raise StateConsumedError(
                "This slot was exchanged: its state is installed, and the slot that `exchange` returned holds what "
                "was installed before. Use that one, or `copy` a slot before you exchange it."
            )

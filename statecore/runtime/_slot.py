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
    _consumed: list[str] = dataclasses.field(default_factory=list, repr=False)

    @property
    def is_consumed(self) -> bool:
        """Whether the slot was exchanged or copied into, so that its state is elsewhere."""
        return bool(self._consumed)

    def consume(self, why: str) -> None:
        """Marks the slot as used up; every later use raises StateConsumedError and says why."""
        self._consumed.append(why)

    def check_usable(self) -> None:
        """Raises StateConsumedError if the slot was used up."""
        if self._consumed:
            raise StateConsumedError(f"This slot was {self._consumed[0]}. `copy` a slot that you need again.")

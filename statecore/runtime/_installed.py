"""What a runtime holds, and whether it can work."""

import dataclasses
from typing import NamedTuple

import numpy as np

from statecore._typing import PyTree
from statecore.backend import Window
from statecore.native import Reservation
from statecore.state import mark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """Whether the runtime can do its work now, and if not, why."""

    is_supported: bool
    reason: str | None = None


class Installed(NamedTuple):
    """What a runtime holds; replaced whole, so that an interrupt leaves the old or the new.

    state: the planes.
    lengths: `[B]` int64, the host mirror of the position; read-only.
    version: counts changes, so that a driver can notice others.
    window: verified and not yet committed.
    num_valid: `[B]` rows of the window.
    is_settled: whether the state is known to be complete and good.
    is_shared: whether a slot may refer to the same buffers.
    is_patched: whether the state was edited since it was last empty.
    reservation: what the state holds of the budget of the slot that it came from.
    """

    state: PyTree
    lengths: np.ndarray
    version: int = 0
    window: Window | None = None
    num_valid: np.ndarray | None = None
    is_settled: bool = False
    is_shared: bool = False
    is_patched: bool = False
    reservation: Reservation | None = None


def marked(state: PyTree, is_patched: bool) -> PyTree:
    """Returns `state`, its arrays marked if it is patched: so they are known out of the runtime too."""
    if is_patched:
        mark(state)
    return state


def read_only(lengths: np.ndarray) -> np.ndarray:
    """Returns lengths that slots and runtimes may refer to in common."""
    lengths.flags.writeable = False
    return lengths

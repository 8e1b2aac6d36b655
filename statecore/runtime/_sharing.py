"""Who holds the same buffers, after captures that copied nothing.

A lazy capture refers to the buffers of the installed state. Until one of the two moves
on, a transition must not donate them. So each load has a book of the runtimes and slots
that may share; it holds none of them alive, and what it says is found by looking at the
arrays themselves, so that it cannot be out of date.
"""

import threading
import weakref
from collections import Counter
from typing import Protocol

import jax

from statecore.backend import Identity


class Holder(Protocol):
    """A runtime or a slot."""

    def held_leaves(self) -> list[jax.Array]:
        """Returns the arrays it holds now."""
        ...


class Sharers:
    """The holders of one load that may share buffers.

    lock: held while a buffer passes from one holder to another, so that no other thread
      finds it with neither.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def add(self, *holders: Holder) -> None:
        """Notes holders that share with another one, or may."""
        with self.lock:
            self._holders.update(holders)

    def is_sharing(self, holder: Holder) -> bool:
        """Returns whether another holder has an array of `holder`."""
        return bool(self.shared(holder, holder.held_leaves()))

    def shared(self, holder: Holder, leaves: list[jax.Array]) -> list[int]:
        """Returns which of the `leaves` of `holder` another holder has too."""
        with self.lock:
            if holder not in self._holders:
                return []
            others = {id(leaf) for other in list(self._holders) if other is not holder for leaf in other.held_leaves()}
            return [i for i, leaf in enumerate(leaves) if id(leaf) in others]

    def drop_settled(self) -> None:
        """Forgets holders that share nothing any more, so that the book stays short."""
        with self.lock:
            held = [(holder, [id(leaf) for leaf in holder.held_leaves()]) for holder in list(self._holders)]
            counts = Counter(name for _, names in held for name in names)
            for holder, names in held:
                if all(counts[name] == 1 for name in names):
                    self._holders.discard(holder)


def of(identity: Identity) -> Sharers:
    """Returns the book of a load: slots go to no runtime of another one."""
    # Kept by the load itself and set in one step, which no interrupt and no thread divides.
    return vars(identity.load).setdefault("_sharers", Sharers())

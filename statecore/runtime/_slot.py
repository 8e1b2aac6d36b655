"""A saved state of a runtime."""

import dataclasses
from typing import Any

import jax
import numpy as np

from statecore._errors import StateConsumedError
from statecore._pytree import is_deleted
from statecore._typing import PyTree
from statecore.backend import Identity
from statecore.native import Reservation
from statecore.runtime import _sharing
from statecore.state import notebook_html


class Claim:
    """One caller's hold on a slot, and what it uses the slot up for."""

    __slots__ = ("why",)

    def __init__(self, why: str):
        self.why = why


class Use:
    """What changes of a slot: whether it was used up, what it holds of a budget, what was checked.

    A record of its own, so that slots made of each other by `dataclasses.replace` are used
    up together: they have buffers in common.
    """

    # Whether another holder may have its arrays too.
    may_share: bool = False
    reservation: Reservation | None = None
    # (geometry, leaves, lengths) that were found to fit each other, compared by identity.
    seal: tuple[Any, list[jax.Array], np.ndarray] | None = None

    def __init__(self) -> None:
        # The claim that used the slot up, if any. The first one counts: setting a default is one
        # step, which no interrupt and no thread divides, where a lock could stay held.
        self._claimed: dict[None, Claim] = {}
        # What a copy costs, by the mode of the capture, and the seal that it was computed under.
        self.estimates: tuple[Any, dict[str, Any]] = None, {}

    def __deepcopy__(self, memo: dict) -> "Use":
        # The copied slot has arrays of its own, which no budget was asked for.
        copied = Use()
        copied._claimed = dict(self._claimed)
        return copied

    @property
    def is_claimed(self) -> bool:
        """Whether the slot was used up."""
        return bool(self._claimed)

    @property
    def consumed(self) -> str | None:
        """Why the slot was used up; None if it was not."""
        claim = self._claimed.get(None)
        return None if claim is None else claim.why

    def claim(self, claim: Claim) -> None:
        """Uses the slot up, for one caller of several threads."""
        while self._claimed.setdefault(None, claim) is not claim:
            self.check()  # or the other one gave it up in between

    def has(self, claim: Claim) -> bool:
        """Whether it is this claim that used the slot up."""
        return self._claimed.get(None) is claim

    def unclaim(self, claim: Claim) -> None:
        """Makes the slot what it was before `claim`; does nothing to another one's."""
        if self.has(claim):
            self._claimed.clear()

    def check(self) -> None:
        """Raises StateConsumedError if the slot was used up."""
        if self.consumed is not None:
            raise StateConsumedError(f"This slot was {self.consumed}. `copy` a slot that you need again.")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """A saved state, and what it belongs to.

    state: the planes; nobody else holds their buffers, once it is settled.
    identity: the load and weights that made it.
    lengths: `[B]` int64 on the host, what the position plane holds.
    num_rows: rows that append planes were cut to by a compact capture; None if they are whole.
    is_patched: whether the state was edited since it was last empty, so that it is no
      longer what its tokens alone would give.
    """

    state: PyTree
    identity: Identity
    lengths: np.ndarray
    num_rows: int | None = None
    is_patched: bool = False
    use: Use = dataclasses.field(default_factory=Use, repr=False)

    @classmethod
    def of(cls, state: PyTree, identity: Identity, lengths: np.ndarray, is_patched: bool) -> "Slot":
        """Returns a whole slot, made in a quarter of the time that a frozen record takes."""
        slot = object.__new__(cls)
        fields = slot.__dict__
        fields["state"], fields["identity"], fields["lengths"], fields["is_patched"] = (
            state,
            identity,
            lengths,
            is_patched,
        )
        fields["use"] = Use()
        return slot

    @property
    def is_consumed(self) -> bool:
        """Whether the slot was exchanged or copied into, so that its state is elsewhere."""
        return self.use.consumed is not None

    @property
    def is_settled(self) -> bool:
        """Whether the slot owns its buffers alone: a lazy capture does after the next transition."""
        return not (self.use.may_share and _sharing.of(self.identity).is_sharing(self))

    @property
    def reservation(self) -> Reservation | None:
        """What the slot holds of the budget that it was captured under."""
        return self.use.reservation

    def _repr_html_(self) -> str | None:
        geometry = None if self.use.seal is None else self.use.seal[0]
        # Without a geometry nothing says what the planes are, and the text form must do.
        is_gone = self.is_consumed or any(map(is_deleted, jax.tree.leaves(self.state)))
        return None if geometry is None or is_gone else notebook_html("show_saved", self, geometry)

    def consume(self, why: str) -> None:
        """Marks the slot as used up; every later use raises StateConsumedError and says why."""
        if self.use.consumed is None:
            self.use.claim(Claim(why))
        self.use.reservation = None

    def check_usable(self) -> None:
        """Raises StateConsumedError if the slot was used up."""
        self.use.check()

    def held_leaves(self) -> list[jax.Array]:
        """Returns the arrays that the slot holds: none once it is used up."""
        return [] if self.is_consumed else jax.tree.leaves(self.state)

"""Complete generations that do not run now: snapshots, which never change, and branches."""

import dataclasses

from statecore._identity import Mark
from statecore.generation._run import Run
from statecore.native import Reservation
from statecore.runtime import Slot


class Driver(Mark):
    """Marks one generation and its branches."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A complete generation at one point; immutable, restorable any number of times.

    slot: the model's state.
    run: history, sampler, draws, forced tokens, constraints and life.
    driver: which generation it belongs to.
    reservation: what it holds of the budget, as long as it lives.
    num_bytes: bytes it holds.
    """

    slot: Slot
    run: Run
    driver: Driver
    reservation: Reservation
    num_bytes: int

    def __repr__(self) -> str:
        return f"Snapshot(after {self.run.num_emitted} tokens, {self.num_bytes:,} bytes)"

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens emitted up to here, a list a sequence."""
        return self.run.tokens


class Branch:
    """A generation that is not running now; `gen.exchange(branch)` lets it run.

    What it holds of the budget is given back when it is dropped.
    """

    def __init__(self, slot: Slot, run: Run, driver: Driver, reservation: Reservation | None, num_bytes: int):
        self.slot, self.run, self.driver, self.reservation = slot, run, driver, reservation
        self.num_bytes = num_bytes

    def __repr__(self) -> str:
        return f"Branch(after {self.run.num_emitted} tokens, {self.run.lifecycle.status.value})"

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens emitted by what this branch holds, a list a sequence."""
        return self.run.tokens

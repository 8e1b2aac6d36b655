"""A budget for saved states: what is reserved is known before anything is copied."""

import dataclasses
import threading
import weakref
from numbers import Integral
from types import TracebackType
from typing import Self

from statecore._errors import BudgetError
from statecore.native._estimate import Estimate, checked_add


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotLimits:
    """Limits on what snapshots and branches may take; None is no limit, 0 allows none.

    max_snapshots: snapshots alive at once.
    max_branches: branches alive at once.
    retained_bytes: bytes that living snapshots and branches hold.
    cumulative_copy_bytes: bytes copied in all, never given back.
    """

    max_snapshots: int | None = None
    max_branches: int | None = None
    retained_bytes: int | None = None
    cumulative_copy_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotUsage:
    """What has been used of a budget."""

    snapshots: int = 0
    branches: int = 0
    retained_bytes: int = 0
    cumulative_copy_bytes: int = 0


class Reservation:
    """What one object holds of a budget; given back when the last reference to it is dropped.

    As a context manager it covers an attempt: what is held is given back at the end of
    the block, whether by an exception or not, unless `keep` was called in it. Copied
    bytes stay counted in each case, since the attempt was made.

        with budget.reserve(cost, snapshots=1) as reservation:
            saved = sc.capture(state)
            reservation.keep()  # now it lives as long as whoever holds it
    """

    def __init__(self, budget: "SnapshotBudget", held: SnapshotUsage):
        self.budget = budget
        self._held = held
        # What this one adds to, kept alive by it.
        self._base: Reservation | None = None
        self._is_kept = False
        # What is to be given back: nothing until the budget has counted it.
        self._counted: list[SnapshotUsage] = []
        self._release = weakref.finalize(self, budget._returned.extend, self._counted)

    def __repr__(self) -> str:
        return f"Reservation({self.held}{'' if self.is_alive else ', given back'})"

    @property
    def held(self) -> SnapshotUsage:
        """What it holds, with what it was added to."""
        return self._held if self._base is None else _total(self._held, self._base.held)

    @property
    def is_alive(self) -> bool:
        """Whether it still holds something."""
        return self._release.alive

    def keep(self) -> Self:
        """Keeps what is held beyond the block of `with`; returns itself."""
        self._is_kept = True
        return self

    def release(self) -> None:
        """Gives back what is held; copied bytes stay counted. A second call does nothing."""
        self._release()
        if self._base is not None:
            self._base.release()

    def with_more(self, estimate: Estimate) -> "Reservation":
        """Reserves more for the same object; returns a reservation of all, which keeps this one as long as it lives.

        Raises:
          BudgetError: as `SnapshotBudget.reserve`; what is held stays.
        """
        more = self.budget.reserve(estimate)
        more._base = self
        return more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.release()


def _total(one: SnapshotUsage, other: SnapshotUsage) -> SnapshotUsage:
    return SnapshotUsage(
        snapshots=one.snapshots + other.snapshots,
        branches=one.branches + other.branches,
        retained_bytes=one.retained_bytes + other.retained_bytes,
        cumulative_copy_bytes=one.cumulative_copy_bytes + other.cumulative_copy_bytes,
    )


class SnapshotBudget:
    """Counts against limits. Lives outside everything that can be restored; may be shared by threads.

    Raises:
      BudgetError: a limit is negative or no whole number.
    """

    def __init__(self, limits: SnapshotLimits):
        for name, limit in dataclasses.asdict(limits).items():
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 0):
                raise BudgetError(
                    f"{name} is {limit!r}, but a limit is a whole number of at least 0, or None for none."
                )
        self.limits = limits
        self._usage = SnapshotUsage()
        self._lock = threading.RLock()
        # A finalizer may run in the middle of a count, in the same thread: it only leaves
        # a note here, and the next count takes it in.
        self._returned: list[SnapshotUsage] = []

    @property
    def usage(self) -> SnapshotUsage:
        """What living reservations hold, and what was copied in all."""
        with self._lock:
            back, usage = self._returned[:], self._usage
            if not back:
                return usage
            left = SnapshotUsage(
                snapshots=usage.snapshots - sum(held.snapshots for held in back),
                branches=usage.branches - sum(held.branches for held in back),
                retained_bytes=usage.retained_bytes - sum(held.retained_bytes for held in back),
                cumulative_copy_bytes=usage.cumulative_copy_bytes,
            )
            end = len(back)
            # One statement without a call: an interrupt comes before both or after both.
            self._usage, self._returned[:end] = left, []
            return left

    def reserve(
        self, estimate: Estimate | None, *, snapshots: int = 0, branches: int = 0, growth: int | None = 0
    ) -> Reservation:
        """Reserves before a copy; the usage is unchanged if it is refused.

        Refuses an unknown cost first, then sums beyond 2**63 - 1, then limits in the order
        snapshots, branches, retained bytes, cumulative copy bytes.

        Args:
          estimate: what the copy costs; None is refused, limits or not.
          snapshots: 1 if a snapshot is made.
          branches: 1 if a branch is made.
          growth: bytes that what is made may come to hold later; retained, never copied.
            None is refused as unknown.

        Raises:
          BudgetError: the cost is unknown, overflows, or names the first limit that is exceeded.
        """
        if estimate is None:
            raise BudgetError("The cost of this copy is unknown, so it is refused before anything is copied.")
        if growth is None:
            raise BudgetError("What this may grow to is unknown, so it is refused before anything is copied.")
        for name, count in (("snapshots", snapshots), ("branches", branches)):
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
                raise BudgetError(f"{name} is {count!r}, but a reservation is of a whole number of at least 0.")
        with self._lock:
            usage = self.usage
            retained = checked_add(usage.retained_bytes, estimate.retained_bytes, growth)
            copied = checked_add(usage.cumulative_copy_bytes, estimate.copy_bytes)
            if retained is None or copied is None or min(estimate.retained_bytes, estimate.copy_bytes, growth) < 0:
                raise BudgetError(
                    f"overflow: {estimate.retained_bytes:,} bytes to retain, {growth:,} to grow and "
                    f"{estimate.copy_bytes:,} to copy do not add up to a size in 64 bits."
                )
            wanted = SnapshotUsage(
                snapshots=usage.snapshots + snapshots,
                branches=usage.branches + branches,
                retained_bytes=retained,
                cumulative_copy_bytes=copied,
            )
            self._check_limits(wanted)
            held = SnapshotUsage(snapshots=snapshots, branches=branches, retained_bytes=retained - usage.retained_bytes)
            reservation = Reservation(self, held)
            # One statement without a call: an interrupt comes before both or after both.
            self._usage, reservation._counted[:] = wanted, [held]
            return reservation

    def _check_limits(self, wanted: SnapshotUsage) -> None:
        checks = (
            ("snapshot count", wanted.snapshots, self.limits.max_snapshots),
            ("branch count", wanted.branches, self.limits.max_branches),
            ("retained bytes", wanted.retained_bytes, self.limits.retained_bytes),
            ("cumulative copy bytes", wanted.cumulative_copy_bytes, self.limits.cumulative_copy_bytes),
        )
        for name, value, limit in checks:
            if limit is not None and value > limit:
                raise BudgetError(f"{name}: {value:,} would exceed the limit of {limit:,}. Drop a snapshot or branch.")

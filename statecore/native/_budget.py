"""A budget for saved states: what is reserved is known before anything is copied."""

import dataclasses
import weakref

from statecore._errors import BudgetError
from statecore.native._estimate import Estimate


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
    """What one object holds of a budget; given back when the object is dropped."""

    def __init__(self, budget: "SnapshotBudget", held: SnapshotUsage):
        self._release = weakref.finalize(self, budget._give_back, held)

    def release(self) -> None:
        """Gives back what is held; copied bytes stay counted. A second call does nothing."""
        self._release()


class SnapshotBudget:
    """Counts against limits. Lives outside everything that can be restored."""

    def __init__(self, limits: SnapshotLimits):
        self.limits = limits
        self.usage = SnapshotUsage()

    def reserve(self, estimate: Estimate | None, *, snapshots: int = 0, branches: int = 0) -> Reservation:
        """Reserves before a copy; the usage is unchanged if it is refused.

        Args:
          estimate: what the copy costs; None is refused, limits or not.
          snapshots: 1 if a snapshot is made.
          branches: 1 if a branch is made.

        Raises:
          BudgetError: the cost is unknown, or names the first limit that is exceeded.
        """
        if estimate is None:
            raise BudgetError("The cost of this copy is unknown, so it is refused before anything is copied.")
        held = SnapshotUsage(snapshots=snapshots, branches=branches, retained_bytes=estimate.retained_bytes)
        wanted = self._plus(held, estimate.copy_bytes)
        checks = (
            ("snapshot count", wanted.snapshots, self.limits.max_snapshots),
            ("branch count", wanted.branches, self.limits.max_branches),
            ("retained bytes", wanted.retained_bytes, self.limits.retained_bytes),
            ("cumulative copy bytes", wanted.cumulative_copy_bytes, self.limits.cumulative_copy_bytes),
        )
        for name, value, limit in checks:
            if limit is not None and value > limit:
                raise BudgetError(f"{name}: {value:,} would exceed the limit of {limit:,}. Drop a snapshot or branch.")
        self.usage = wanted
        return Reservation(self, held)

    def _plus(self, held: SnapshotUsage, copied: int, sign: int = 1) -> SnapshotUsage:
        return SnapshotUsage(
            snapshots=self.usage.snapshots + sign * held.snapshots,
            branches=self.usage.branches + sign * held.branches,
            retained_bytes=self.usage.retained_bytes + sign * held.retained_bytes,
            cumulative_copy_bytes=self.usage.cumulative_copy_bytes + copied,
        )

    def _give_back(self, held: SnapshotUsage) -> None:
        self.usage = self._plus(held, 0, sign=-1)

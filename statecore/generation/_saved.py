"""What a generation saves and comes back to: snapshots, forks, exchanges, and their budget."""

import dataclasses
from typing import Any, overload

import jax
import numpy as np

from statecore._errors import BudgetError, FencedError, GeometryError, IdentityError, LifecycleError
from statecore.generation._growth import growth as growth_of
from statecore.generation._lifecycle import IDLE, Control, Lifecycle, Status
from statecore.generation._run import Run, RunId
from statecore.generation._sampler import key_of
from statecore.generation._snapshot import Branch, Driver, Snapshot
from statecore.generation._start import check_max_tokens
from statecore.generation._tree import Family, Tree
from statecore.native import Estimate, Reservation, SnapshotBudget, SnapshotLimits, SnapshotUsage
from statecore.runtime import Runtime, Slot, faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotSupport:
    """Whether a complete snapshot can be taken, and if not, who cannot be saved and why."""

    is_supported: bool
    owner: str | None = None
    reason: str | None = None


class SavedRuns:
    """The runs of one generation: the one that runs now in its runtime, and those saved of it."""

    def __init__(self, runtime: Runtime, run: Run):
        self.runtime, self.control = runtime, Control()
        self._run, self._version = run, runtime.version
        self._driver, self._family = Driver(), Family(run.run_id)
        self._reservation: Reservation | None = None
        self._is_emitting = False
        self._budget: SnapshotBudget | None = None

    def enable_snapshots(self, limits: SnapshotLimits) -> None:
        """Sets the limits of this generation and all its branches, once, before the first snapshot.

        Raises:
          BudgetError: they are no limits.
          LifecycleError: limits were set before, or a snapshot was taken without any.
        """
        if not isinstance(limits, SnapshotLimits):
            raise BudgetError(f"`limits` must be a SnapshotLimits, but is {limits!r}.")
        if self._budget is not None:
            raise LifecycleError("Snapshots are enabled already; their limits are set once, before the first.")
        self._budget = SnapshotBudget(limits)

    @property
    def usage(self) -> SnapshotUsage:
        """What snapshots and branches take now."""
        return SnapshotUsage() if self._budget is None else self._budget.usage

    def support(self) -> SnapshotSupport:
        """Returns whether a complete snapshot can be taken, or who cannot be saved and why."""
        native = self.runtime.support()
        if not native.is_supported:
            return SnapshotSupport(is_supported=False, owner="runtime", reason=native.reason)
        for number, row in enumerate(self._run.rows):
            if row.constraint is not None and row.constraint.nbytes() is None:
                reason = f"{type(row.constraint).__name__} does not know its size, so its copy cannot be reserved"
                return SnapshotSupport(is_supported=False, owner=f"constraint of sequence {number}", reason=reason)
        if self.runtime.estimate() is None:
            return SnapshotSupport(is_supported=False, owner="runtime", reason="the size of a plane is not known")
        return SnapshotSupport(is_supported=True)

    def estimate(self, snapshot: Snapshot | None = None) -> Estimate | None:
        """Returns what a snapshot of now, or a copy of `snapshot`, costs; None if unknown.

        The state and the constraints are copied. What is immutable (history, sampler,
        saved boundaries) is shared, so it is held and not copied.
        """
        faults.reach("estimate")
        native = self.runtime.estimate(None if snapshot is None else snapshot.slot)
        return (self._run if snapshot is None else snapshot.run).with_owners(native)

    def snapshot(self) -> Snapshot:
        """Returns this point of the generation, complete and independent.

        Raises:
          BudgetError: the copy's cost is unknown or exceeds a limit; nothing was copied.
          LifecycleError: the run is cancelled, or something else drove the runtime.
        """
        self._check_driving()
        life = self._run.lifecycle.checkpoint()
        estimate = self.estimate()
        reservation = self._reserve(estimate, "This snapshot", snapshots=1)
        with reservation:
            faults.reach("pending")
            run = self._run.copy(lifecycle=life).detach()
            slot = self.runtime.capture()
            reservation.keep()
        assert estimate is not None
        snapshot = Snapshot(
            slot=slot, run=run, driver=self._driver, reservation=reservation, num_bytes=estimate.retained_bytes
        )
        self._family.add_snapshot(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to `snapshot`, which stays usable.

        It also mends a generation whose call was cut short, or whose runtime was moved by hand.

        Raises:
          IdentityError: it belongs to another generation, or to another branch of this one.
          BudgetError: the copy exceeds a limit.
          LifecycleError: this run was cancelled or has failed, or another generation has
            taken over the runtime.
        """
        self._check_owner()
        self._check_saved(snapshot, Snapshot)
        if snapshot.run.run_id is not self._run.run_id:
            raise IdentityError(
                "This snapshot belongs to another branch of the generation. Restore it where it was taken, or "
                "`fork` it."
            )
        self._settle_life()
        life = self._run.lifecycle.restore(snapshot.run.lifecycle)
        self.runtime.abandon()  # a window that a call left open
        with self._reserve(self.estimate(snapshot), "Restoring"):
            # Everything that can fail comes first; the exchange is the last of it.
            faults.reach("pending")
            run, staged = snapshot.run.copy(lifecycle=life).detach(), self.runtime.copy(snapshot.slot)
            self.runtime.exchange(staged)
            self._run, self._version = run, self.runtime.version

    @overload
    def fork(
        self, snapshot: Snapshot, *, seed: int | jax.Array | None = None, max_tokens: int | None = None
    ) -> Branch: ...

    @overload
    def fork(
        self, snapshot: Snapshot, *, n: int, seed: int | jax.Array | None = None, max_tokens: int | None = None
    ) -> list[Branch]: ...

    def fork(
        self,
        snapshot: Snapshot,
        *,
        seed: int | jax.Array | None = None,
        n: int | None = None,
        max_tokens: int | None = None,
    ) -> Branch | list[Branch]:
        """Returns a branch that goes on from `snapshot`. Runs nothing and draws nothing.

        Args:
          snapshot: of this generation or of one of its branches.
          seed: of the branch's draws from here on; the snapshot's if None.
          n: how many branches, as a list; each draws differently, by folding its number
            into the seed. All are made, or none.
          max_tokens: tokens to emit in all, the snapshot's included; the snapshot's limit if None.

        Raises:
          IdentityError: the snapshot belongs to another generation.
          BudgetError: the copy or the growth of the branch is unknown or exceeds a limit.
          CapacityError: `max_tokens` is less than was emitted, or more than fits.
        """
        self._check_owner()
        self._check_saved(snapshot, Snapshot)
        key = snapshot.run.sampling.key if seed is None else key_of(seed)
        if n is None:
            return self._counted([self._fork(snapshot, key, max_tokens)], snapshot)[0]
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise LifecycleError(f"n is {n!r}, but must be a whole number of branches, at least 1.")
        keys = [None if key is None else jax.random.fold_in(key, number) for number in range(n)]
        return self._counted([self._fork(snapshot, one, max_tokens) for one in keys], snapshot)

    def _fork(self, snapshot: Snapshot, key: jax.Array | None, max_tokens: int | None) -> Branch:
        most = check_max_tokens(self.runtime, snapshot.run, max_tokens)
        child = snapshot.run.forked(RunId(), key, most)
        cost = self.estimate(snapshot)
        faults.reach("growth")
        growth = growth_of(self.runtime, snapshot.slot, child)
        with self._reserve(cost, "This branch", branches=1, growth=growth) as reservation:
            faults.reach("pending")
            slot = self.runtime.copy(snapshot.slot)
            child.detach()
            reservation.keep()
        return Branch(slot, child, self._driver, reservation, reservation.held.retained_bytes)

    def _counted(self, branches: list[Branch], snapshot: Snapshot) -> list[Branch]:
        for branch in branches:
            self._family.add_branch(branch, snapshot.run.run_id)
        return branches

    def exchange(self, branch: Branch) -> None:
        """Runs what `branch` held from now on; `branch` holds what ran until now. Moves no tensor.

        An interrupt leaves both as they were, or exchanged.

        Raises:
          IdentityError: the branch belongs to another generation.
          LifecycleError: the run is running, or something else drove the runtime.
        """
        self._check_driving()
        self._check_saved(branch, Branch)
        self._settle_life()
        kept: list[Slot] = []
        try:
            self.runtime.exchange(branch.slot, kept=kept)
            self._trade(branch, kept)
        except BaseException:
            # An interrupt after the states have moved: the rest follows them.
            self._trade(branch, kept)
            raise

    def _trade(self, branch: Branch, kept: list[Slot]) -> None:
        """Gives `branch` what ran until now and takes what it held, if the states have moved and the rest has not."""
        version = self.runtime.version
        if version == self._version or not kept:
            return
        after = kept[0], self._run, self._reservation, branch.run, branch.reservation, version
        # One statement without a call: an interrupt comes before all or after all.
        branch.slot, branch.run, branch.reservation, self._run, self._reservation, self._version = after
        self._family.count_exchange(branch.run, self._run)

    def tree(self) -> Tree:
        """Returns all runs: who came from whom, what each has emitted and holds."""
        return self._family.tree(self._run, self.usage)

    # Inside.

    def _reserve(self, cost: Estimate | None, what: str, **counts: int) -> Reservation:
        if self._budget is None:
            self._budget = SnapshotBudget(SnapshotLimits())
        if cost is None:
            support = self.support()
            raise BudgetError(f"{what} has an unknown cost ({support.owner}: {support.reason}), so nothing was copied.")
        faults.reach("reserve")
        return self._budget.reserve(cost, **counts)

    def _ended(self, begun: Lifecycle) -> Lifecycle:
        """Returns the life after a call, however it ended."""
        run = self._run
        emitted = run.num_emitted - begun.prediction
        if self.runtime.is_fenced:
            return begun.fail()
        if self.control.take_cancel():
            return dataclasses.replace(begun.cancel(), prediction=run.num_emitted)
        if emitted == 0 and run.live.any():
            return begun.interrupt()
        return begun.complete(num_tokens=emitted, is_complete=not run.live.any())

    def _settle_life(self) -> None:
        """Takes up a cancel that another thread has asked for."""
        if self.control.take_cancel() and self._run.lifecycle.status in IDLE:
            self._run.lifecycle = self._run.lifecycle.cancel()

    def _follow(self) -> None:
        """Takes the runtime's new version as this run's, if the state holds what this run says."""
        if self._run.is_in(self.runtime.lengths):
            self._version = self.runtime.version

    def _check_owner(self) -> None:
        if self._run.lifecycle.status is Status.RUNNING and not self._is_emitting:
            self._run.lifecycle = self._ended(self._run.lifecycle)  # of a call whose end was interrupted
        if self.runtime.driver is not self._driver:
            raise LifecycleError("Another generation was started in this runtime and drives it now.")

    def _check_driving(self) -> None:
        self._check_owner()
        if self._run.lifecycle.status is Status.RUNNING:
            raise LifecycleError(
                "The run is running, and this is called from its draft or another thread. It is changed only between "
                "two calls that emit: `pause` or `cancel` it first."
            )
        if self.runtime.version != self._version:
            if self.runtime.is_fenced:
                raise FencedError(f"The runtime cannot go on: {self.runtime.support().reason}.")
            raise LifecycleError(
                "Something else has advanced or exchanged the runtime of this generation, or a call was cut short, so "
                "its state is no longer this text's. `restore` a snapshot; give each generation a runtime of its own."
            )

    def _check_saved(self, saved: Any, kind: type) -> None:
        if not isinstance(saved, kind):
            raise GeometryError(
                f"A {kind.__name__} is needed here, but this is a {type(saved).__name__}: snapshots are restored and "
                "forked, branches are exchanged."
            )
        if saved.driver is not self._driver:
            raise IdentityError("This snapshot or branch belongs to another generation.")
        if not saved.run.is_in(saved.slot.lengths):
            found, needed = np.array(saved.slot.lengths).tolist(), saved.run.state_lengths().tolist()
            raise LifecycleError(
                f"The state of this {kind.__name__.lower()} holds {found} tokens, but its text "
                f"needs {needed}. Was its slot replaced, or a call cut short? `fork` a snapshot again."
            )

"""The slots of a runtime: estimate, capture, copy, validate, exchange."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np

from statecore._errors import AliasError, BudgetError, GeometryError, UnsupportedError
from statecore._pytree import any_gone, check_unaliased, is_deleted
from statecore._typing import IntLike, PyTree
from statecore.backend import checks
from statecore.native import (
    Estimate,
    Reservation,
    SnapshotBudget,
    bucket_rows,
    capture,
    cut_geometry,
    estimate,
    resize,
    row_extents,
)
from statecore.runtime._fit import (
    check_capture_mode,
    check_fillable,
    check_identity,
    check_is_budget,
    check_is_slot,
    fitting_leaves,
)
from statecore.runtime._growth import growth
from statecore.runtime._installed import Installed, marked, read_only
from statecore.runtime._owner import Owner, locked, locked_load
from statecore.runtime._slot import Claim, Slot
from statecore.runtime.faults import reach
from statecore.state import Geometry, is_marked, validate

_EXCHANGED = "exchanged: its state is installed, and the slot that `exchange` returned holds what was before"
_REUSED = "given as `into=`: the slot that was returned has its buffers"
_LOST = "given as `into=` to a copy that failed after it had taken the buffers, so that what it held is gone"


class SlotOwner(Owner):
    """What an owner does with saved states. Abstract: `Runtime` is what users make."""

    @locked_load
    def estimate(self, slot: Slot | None = None, *, mode: str = "fresh") -> Estimate | None:
        """Returns what a copy of the installed state, or of `slot`, costs in a mode; None if unknown.

        A lazy capture copies no bytes, and retains all once the runtime moves on.
        A compact slot is brought to full capacity by `copy` and by `exchange`, so that both
        cost a fresh copy.
        """
        self._check_idle()
        check_capture_mode(mode)
        if slot is None:
            if self._estimates[0] != self._installed.version:
                self._estimates = self._installed.version, {}
            known, lengths, leaves = self._estimates[1], self._installed.lengths, self._leaves()
        else:
            leaves = self._fitting(slot)
            if slot.use.estimates[0] is not slot.use.seal:
                slot.use.estimates = slot.use.seal, {}
            known, lengths = slot.use.estimates[1], slot.lengths
        if mode not in known:
            known[mode] = self._cost(mode, lengths, leaves)
        return known[mode]

    @locked_load
    def estimate_growth(
        self, slot: Slot | None, num_tokens: int | Sequence[int], *, bucket: int | None = None
    ) -> int | None:
        """Returns the bytes that `num_tokens` more tokens, of all or of each, will hold; None if unknown or too many.

        See `statecore.estimate_growth` for `bucket`.
        """
        self._check_idle()
        if slot is not None:
            self._fitting(slot)
        lengths = self._installed.lengths if slot is None else slot.lengths
        return growth(self.geometry, lengths.tolist(), num_tokens, bucket)

    @locked_load
    def capture(self, *, mode: str = "fresh", into: Slot | None = None, budget: SnapshotBudget | None = None) -> Slot:
        """Returns an independent copy of the installed state, complete in memory. Donates `into`.

        Args:
          mode: `fresh` copies all planes whole, now. `lazy` copies nothing: the slot refers
            to the installed buffers, and the next transition writes elsewhere; until then
            `slot.is_settled` is False. `compact` cuts append planes to the bucket of the
            longest sequence, so that its cost follows the length.
          into: a slot that is no longer needed, of the same geometry as the copy, whose
            buffers take it, so that nothing is allocated.
          budget: what the copy is reserved in before it is made; the slot holds the
            reservation as long as it lives, and takes over that of `into`.

        Raises:
          FencedError, LifecycleError: the runtime has lost its state, or a window is open.
          StateConsumedError, GeometryError, AliasError: `into` cannot take the copy.
          BudgetError: the cost is unknown, or exceeds the budget; nothing was copied.
          UnsupportedError: no such mode, or `lazy` with `into`, which has nothing to take.
        """
        self._check_idle()
        check_capture_mode(mode)
        check_is_budget(budget)
        return self._saved(self._installed, mode, into, budget)

    @locked_load
    def copy(
        self, slot: Slot, *, mode: str = "fresh", into: Slot | None = None, budget: SnapshotBudget | None = None
    ) -> Slot:
        """Returns another independent copy of `slot`, which stays as it is. Donates `into`.

        A compact slot comes back at full capacity, unless `mode` is `compact` again. The
        other arguments and errors are those of `capture`; a copy cannot be `lazy`.
        """
        self._check_idle()
        check_capture_mode(mode)
        check_is_budget(budget)
        if mode == "lazy":
            raise UnsupportedError("A lazy copy of a slot would never be settled by a transition. Copy it `fresh`.")
        self._fitting(slot)
        return self._saved(slot, mode, into, budget)

    @locked_load
    def validate(self, slot: Slot) -> None:
        """Checks that `slot` may be installed here. Changes nothing.

        Looks at health, idleness, support, identity and geometry, in this order.

        Raises:
          FencedError, LifecycleError: the runtime cannot take a state now.
          UnsupportedError: this runtime cannot exchange states at all.
          StateConsumedError: the slot was exchanged, or its buffers are gone.
          IdentityError: it comes from another load or other weights.
          GeometryError: it is no slot, or names every plane that does not fit.
        """
        self._check_installable(slot)

    @locked
    def exchange(self, slot: Slot, *, kept: list[Slot] | None = None) -> Slot:
        """Installs `slot` and returns the slot that holds what was installed. Moves no tensor.

        `slot` is consumed. What goes with a state goes with it: lengths, whether it was
        patched, what it holds of a budget. A compact slot is first copied to full capacity.

        Args:
          slot: to install.
          kept: gets the slot that is returned before anything moves, so that an interrupt on
            the way back cannot lose what was installed; it is worth nothing if `version` stays.

        Raises:
          FencedError, LifecycleError, UnsupportedError, StateConsumedError, IdentityError,
            GeometryError: as `validate`; nothing has changed.
          BudgetError: a compact slot, and the cost of its copy is unknown, or exceeds the
            budget that the slot was captured under.
        """
        if not self._was_checked(slot):
            self._check_installable(slot)
        state, reservation = slot.state, slot.use.reservation
        if slot.num_rows is not None:
            reservation = self._reserved_whole(slot)
            state = self._whole(slot)
        reach("exchange")
        if not slot.use.may_share and not self._installed.is_shared:
            return self._swapped(slot, state, reservation, kept)
        with self._book.lock:
            return self._swapped(slot, state, reservation, kept)

    @locked_load
    def replace_state(self, state: PyTree, *, is_patched: bool = True, lengths: IntLike | None = None) -> None:
        """Installs an independent copy of `state`, such as an edited or a stored one. Donates nothing.

        Args:
          state: of this runtime's geometry.
          is_patched: whether it is no longer what its tokens alone would give; so it is
            anyway if the installed state or an array of `state` is marked. The mark goes
            with the state wherever it goes and is cleared by `reset` only.
          lengths: `[B]` tokens it holds; those of the installed state if None.

        Raises:
          FencedError, LifecycleError: the runtime cannot take a state now.
          StateConsumedError, GeometryError: the state does not fit, or its position is not `lengths`.
          RefusedError, CapacityError: no state of this capacity can hold `lengths`.
          AliasError: two of its planes share a buffer.
          BudgetError: the cost of the copy is unknown.
        """
        self._check_idle()
        wanted = self._installed.lengths if lengths is None else checks.host_ints(lengths, "lengths")
        validate(self.geometry, state)
        layout = self.geometry.layout
        check_unaliased(layout.named(state))
        found = np.array(layout.lengths(state))
        if not np.array_equal(found, wanted):
            raise GeometryError(
                f"Position plane `{layout.paths[layout.position]}` of this state holds {found.tolist()}, but "
                f"{wanted.tolist()} tokens are expected. An edit leaves the position alone; say `lengths=` for another."
            )
        check_fillable(self.geometry, wanted)
        self._known_cost("fresh", wanted)
        reach("copy")
        copied = jax.block_until_ready(capture(state))
        reach("copied")
        is_patched = is_patched or self._installed.is_patched or is_marked(state)
        new = self._following(marked(copied, is_patched), read_only(wanted.copy()))
        self._install(new._replace(is_settled=True, is_patched=is_patched))
        self._book.drop_settled()

    # Inside.

    def _swapped(self, slot: Slot, state: PyTree, reservation: Reservation | None, kept: list[Slot] | None) -> Slot:
        """Puts `state`, which is `slot`'s, in place of the installed one, and returns that as a slot."""
        before, use = self._installed, slot.use
        held = Slot.of(before.state, self.identity, before.lengths, before.is_patched)
        now, seal, claim = held.use, use.seal, Claim(_EXCHANGED)
        now.seal, now.reservation = (self.geometry, self._leaves(), before.lengths), before.reservation
        if before.is_shared:
            now.may_share = True
            self._book.add(held)
        if use.may_share:
            self._book.add(self)
        if kept is not None:
            kept.append(held)
        new = Installed(
            state, slot.lengths, before.version + 1, None, None, True, use.may_share, slot.is_patched, reservation
        )
        try:
            use.claim(claim)
            self._install(new)
        except BaseException:
            # An interrupt between the two: the slot still is what it was.
            if self._installed is before:
                use.unclaim(claim)
            raise
        use.reservation = None
        if seal is not None and state is slot.state:
            self._sealed = state, seal[1]
        return held

    def _was_checked(self, slot: Slot) -> bool:
        """Returns whether `_check_installable` would find what it found before: one look, for exchanges back and forth.

        False only says that it must be asked.
        """
        if type(slot) is not Slot or (seal := slot.use.seal) is None:
            return False
        if seal[0] is not self.geometry or seal[2] is not slot.lengths or slot.identity is not self.identity:
            return False
        now = self._installed
        if slot.num_rows is not None or slot.use.is_claimed or self._fence is not None:
            return False
        if now.window is not None or not now.is_settled:
            return False
        try:
            leaves = self._flatten(slot.state)
        except ValueError:
            return False
        is_same = all(map(operator.is_, leaves, seal[1]))
        return is_same and not any_gone(leaves) and not any_gone(self._leaves())

    def _check_installable(self, slot: Slot) -> None:
        self._check_idle()
        if self._unsupported:
            raise UnsupportedError(f"{self.model.name} cannot capture or exchange states: {self._unsupported}.")
        self._fitting(slot)

    def _fitting(self, slot: Slot) -> list[jax.Array]:
        """Returns the leaves of a slot that belongs here."""
        check_is_slot(slot)
        slot.check_usable()
        check_identity(slot, self.identity, self.model.name)
        return fitting_leaves(slot, self._geometry_of(slot.num_rows), self._leaves())

    def _geometry_of(self, num_rows: int | None) -> Geometry:
        """Returns the geometry of whole slots, or of compact ones, each one object for good."""
        if num_rows is None:
            return self.geometry
        if num_rows not in self._cut_geometries:
            self._cut_geometries[num_rows] = cut_geometry(self.geometry, num_rows)
        return self._cut_geometries[num_rows]

    def _cost(self, mode: str, lengths: np.ndarray, leaves: list[jax.Array] | None = None) -> Estimate | None:
        """Returns what a copy costs; what can be read of it and where it lies only if `leaves` are given."""
        reach("estimate")
        geometry = self._geometry_of(self._num_rows(mode, lengths))
        if leaves is None:
            cost = estimate(geometry)
        else:
            shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
            cost = estimate(geometry, lengths=lengths.tolist(), shardings=shardings)
        return cost if cost is None or mode != "lazy" else dataclasses.replace(cost, copy_bytes=0)

    def _num_rows(self, mode: str, lengths: np.ndarray) -> int | None:
        if mode != "compact" or self.token_capacity is None:
            return None  # without append planes there is nothing to cut
        return bucket_rows(int(lengths.max(initial=0)), self.token_capacity)

    def _known_cost(self, mode: str, lengths: np.ndarray) -> Estimate:
        cost = self._cost(mode, lengths)
        if cost is None:
            raise BudgetError(
                f"The cost of this copy is unknown, so it is refused before anything is copied: {self._unsupported}."
            )
        return cost

    def _saved(self, source: Installed | Slot, mode: str, into: Slot | None, budget: SnapshotBudget | None) -> Slot:
        """Returns a slot with the state of `source`, in buffers of its own or in those of `into`."""
        num_rows = self._num_rows(mode, source.lengths)
        if into is None:
            return self._admitted(source, mode, num_rows, None, budget)
        self._check_target(source, into, mode, num_rows)
        claim = Claim(_REUSED)
        try:
            # Before its buffers are taken: another runtime may be about to install them.
            into.use.claim(claim)
            return self._admitted(source, mode, num_rows, into, budget)
        except BaseException:
            _give_back(into, claim)
            raise

    def _admitted(
        self,
        source: Installed | Slot,
        mode: str,
        num_rows: int | None,
        into: Slot | None,
        budget: SnapshotBudget | None,
    ) -> Slot:
        """Returns the copy, admitted by the budget before it is made."""
        cost = self._known_cost(mode, source.lengths)
        with _reserved(budget, cost, into) as reservation, _reading(source):
            reach("copy")
            if mode == "lazy":
                slot = self._referring(source)
            elif num_rows is None and getattr(source, "num_rows", None) is None:
                slot = self._copied(source, into)
            else:
                slot = self._resized(source, num_rows, into)
            reach("copied")
            slot.use.reservation = None if reservation is None else reservation.keep()
            if into is not None:
                into.use.reservation = None
        return slot

    def _check_target(self, source: Installed | Slot, into: Slot, mode: str, num_rows: int | None) -> None:
        if mode == "lazy":
            raise UnsupportedError("A lazy capture copies nothing, so `into=` has nothing to take.")
        self._fitting(into)
        if into.num_rows != num_rows:
            found, needed = (f"{rows} rows" if rows else "full capacity" for rows in (into.num_rows, num_rows))
            paths = ", ".join(f"`{self.geometry.layout.paths[i]}`" for i in self.geometry.layout.indices("append"))
            raise GeometryError(
                f"The slot given as `into=` holds {paths} at {found}, but this copy needs {needed}. Keep a slot of "
                "each size."
            )
        if not into.is_settled:
            raise AliasError(
                "The slot given as `into=` was captured lazily and still shares its buffers, so writing there would "
                "destroy the other holder's state. Give another slot, or step the runtime first."
            )
        layout = self.geometry.layout
        check_unaliased(
            layout.named(source.state) + [(f"into.{path}", leaf) for path, leaf in layout.named(into.state)]
        )

    def _copied(self, source: Installed | Slot, into: Slot | None) -> Slot:
        target = None if into is None else into.state
        copied = jax.block_until_ready(capture(source.state, into=target))
        return self._made(copied, source, None)

    def _resized(self, source: Installed | Slot, num_rows: int | None, into: Slot | None) -> Slot:
        extents = row_extents(self._geometry_of(num_rows))
        target = None if into is None else into.state
        resized = jax.block_until_ready(resize(self.model.backend, source.state, extents, into=target))
        return self._made(resized, source, num_rows)

    def _made(self, state: PyTree, source: Installed | Slot, num_rows: int | None) -> Slot:
        lengths, is_patched = source.lengths, source.is_patched
        state = marked(state, is_patched)
        slot = Slot(state=state, identity=self.identity, lengths=lengths, num_rows=num_rows, is_patched=is_patched)
        slot.use.seal = self._geometry_of(num_rows), jax.tree.leaves(state), lengths
        return slot

    def _referring(self, source: Installed | Slot) -> Slot:
        """Returns a slot that refers to the installed buffers, and notes that it does."""
        slot = self._made(self.geometry.layout.unflatten(self.held_leaves()), source, None)
        slot.use.may_share = True
        self._book.add(self, slot)
        self._installed = self._installed._replace(is_shared=True)
        return slot

    def _whole(self, slot: Slot) -> PyTree:
        """Returns the state of a compact slot at full capacity, in buffers of its own."""
        reach("copy")
        with _reading(slot):
            state = resize(self.model.backend, slot.state, row_extents(self.geometry))
        return marked(jax.block_until_ready(state), slot.is_patched)

    def _reserved_whole(self, slot: Slot) -> Reservation | None:
        """Returns what a compact slot holds of a budget once it is whole: more, by what it grows and is copied."""
        held, cost = slot.use.reservation, self._known_cost("fresh", slot.lengths)
        now = estimate(self._geometry_of(slot.num_rows))
        reach("reserve")
        if held is None or not held.is_alive or now is None:
            return held
        return held.with_more(dataclasses.replace(cost, retained_bytes=cost.retained_bytes - now.retained_bytes))


def _give_back(into: Slot, claim: Claim) -> None:
    """Undoes the claim of a copy that failed; a slot whose buffers were taken by then is gone, and holds nothing."""
    if not into.use.has(claim):
        return
    if not any(map(is_deleted, jax.tree.leaves(into.state))):
        into.use.unclaim(claim)
        return
    claim.why = _LOST
    if into.reservation is not None:
        into.reservation.release()
    into.use.reservation = None


@contextmanager
def _reading(source: Installed | Slot) -> Iterator[None]:
    """Says of a slot that another thread used up in the middle of a copy what happened to it."""
    try:
        yield
    except (RuntimeError, ValueError):  # what JAX raises for a buffer that is gone
        if isinstance(source, Slot):
            source.check_usable()
        raise


@contextmanager
def _reserved(budget: SnapshotBudget | None, cost: Estimate, into: Slot | None) -> Iterator[Reservation | None]:
    """Reserves a copy, and gives the reservation back if it is not kept.

    A slot that is copied into has been paid for: its reservation goes on, and only the
    bytes to copy are new.
    """
    held = None if into is None else into.reservation
    reach("reserve")
    if held is not None and (budget is None or held.budget is budget):
        if budget is not None:
            budget.reserve(dataclasses.replace(cost, retained_bytes=0)).release()
        yield held
    elif budget is None:
        yield None
    else:
        with budget.reserve(cost, snapshots=1) as reservation:
            yield reservation

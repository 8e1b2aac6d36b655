"""`SnapshotPool`: a fixed number of slots on the device, one sequence's recurrent state each."""

import dataclasses
import heapq
from collections.abc import Sequence

import jax
import numpy as np

from statecore._errors import (
    BudgetError,
    FencedError,
    GeometryError,
    IdentityError,
    RollbackError,
    StateConsumedError,
    UnsupportedError,
)
from statecore._pytree import is_deleted
from statecore._typing import PyTree
from statecore.backend import Backend, checks
from statecore.state import is_marked, mark, put, take
from statecore.store import _planes
from statecore.store._sizing import POOLED_KINDS, pool_bytes


class PoolOrigin:
    """Marks what one pool has handed out. Compared by identity; holds nothing alive."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotHandle:
    """The right to one slot of a pool, until it is freed.

    slot: which row of the pooled planes.
    generation: how often the slot had been freed when it was claimed.
    origin: which pool it is a slot of.
    """

    slot: int
    generation: int
    origin: PoolOrigin = dataclasses.field(repr=False)


class SnapshotPool:
    """Slots for the planes of one sequence each that have one size, whatever its length.

    Allocated once, with one more slot than can be claimed: the dummy, where padding rows
    write. A slot is a row of the pooled planes, and which one is data, so nothing compiles
    twice. Writes are in place. The free list is on the host, outside of what is donated;
    the lowest free slot goes first. Not thread-safe.

    Append planes are not pooled, as they grow with the sequence. Constant planes are left
    out, since tokens never change them. An opaque plane is refused: a restored slot takes
    its row back to an earlier time, and nothing takes an opaque plane back.

    Args:
      backend: of the states to be saved.
      params: its parameters, for `init` to say what a fresh slot holds.
      num_slots: slots that can be claimed; 0 allocates nothing.
      capacity: tokens that `init` is asked for, if a pooled plane's shape depends on it.
      kinds: the kinds of planes to hold; `position` is always among them. Add `sliding`
        to keep rings as they are.

    Raises:
      UnsupportedError: the backend has an opaque plane, or a kind has no fixed size.
      GeometryError: `num_slots` is negative, or a plane to be pooled has no elements.
    """

    def __init__(
        self,
        backend: Backend,
        params: PyTree,
        *,
        num_slots: int,
        capacity: int = 1,
        kinds: Sequence[str] = POOLED_KINDS,
    ):
        _check_kinds(backend, kinds)
        checks.whole(num_slots, "num_slots")
        self.backend = backend
        self.num_slots = num_slots
        self.kinds = tuple(kinds)
        self._params, self._capacity = params, capacity
        self._geometry = backend.geometry(params, batch=1, capacity=capacity)
        self.nbytes: int | None = pool_bytes(self._geometry, num_slots, kinds=self.kinds)
        self._indices = backend.layout.indices(*self.kinds)
        self._layout = _planes.part(backend.layout, self._indices)
        self._origin = PoolOrigin()
        self._free = list(range(num_slots))
        self._generations = [0] * num_slots
        self._patched: set[int] = set()  # slots whose state was edited by hand, which goes with it
        self._pool = self._fresh(num_slots + 1) if num_slots else []

    def __repr__(self) -> str:
        return f"SnapshotPool({self.backend.name}, {self.num_slots - len(self._free)} of {self.num_slots} used)"

    @property
    def occupancy(self) -> tuple[int, int] | None:
        """Slots in use and slots in all, the dummy not counted; None for a pool of none."""
        return (self.num_slots - len(self._free), self.num_slots) if self.num_slots else None

    def claim(self) -> SnapshotHandle:
        """Takes the lowest free slot and fills it with what `init` makes of an empty sequence.

        Raises:
          BudgetError: no slot is free; a slot is never handed out twice.
          FencedError: a write failed before, and what the slots held is lost. So say all
            that read or write a slot.
        """
        if not self._free:
            raise BudgetError(
                f"All {self.num_slots} slots of this pool are in use. Free a slot, or make the pool with more."
            )
        slot = self._free[0]
        self._write(self._fresh(1), [0], [slot])
        self._patched.discard(slot)
        heapq.heappop(self._free)
        return SnapshotHandle(slot=slot, generation=self._generations[slot], origin=self._origin)

    def free(self, handle: SnapshotHandle) -> None:
        """Gives a slot back; from now on the handle is stale.

        Raises:
          StateConsumedError: it was freed before.
          IdentityError: it is a slot of another pool.
        """
        self._check(handle, "free it again")
        self._generations[handle.slot] += 1
        heapq.heappush(self._free, handle.slot)

    def is_live(self, handle: SnapshotHandle) -> bool:
        """Returns whether the slot is still this handle's."""
        _check_handle(handle)
        return handle.origin is self._origin and self._generations[handle.slot] == handle.generation

    def save(self, handle: SnapshotHandle, state: PyTree, row: int) -> None:
        """Copies the pooled planes of sequence `row` into the slot. Donates nothing of `state`.

        Raises:
          StateConsumedError: the handle is stale, or the state was donated.
          GeometryError: there is no such row, or a plane has another shape or dtype.
          RefusedError: a transition inside a trace was refused on this state.
        """
        self._check(handle, "save into it")
        self._check_state(state, row)
        self._write(self._own(state), [row], [handle.slot])
        self._note_mark([handle.slot], state)

    def save_rows(self, handles: Sequence[SnapshotHandle | None], state: PyTree) -> None:
        """Copies every sequence of `state` into its slot in one call. Donates nothing of `state`.

        Args:
          handles: one for each sequence; None for a padding row, which the dummy takes.
          state: of as many sequences.

        Raises:
          GeometryError: the number of handles is not the batch, or a slot is given twice.
          StateConsumedError, IdentityError, RefusedError: as `save`.
        """
        _check_list(handles)
        given = [handle for handle in handles if handle is not None]
        for handle in given:
            self._check(handle, "save into it")
        lengths = self._check_state(state, 0)
        if len(handles) != len(lengths) or len({handle.slot for handle in given}) != len(given):
            raise GeometryError(
                f"{len(handles)} handles, {len({handle.slot for handle in given})} slots of them different, were "
                f"given for {len(lengths)} sequences. Give each its own slot, and None for a padding row."
            )
        slots = [self.num_slots if handle is None else handle.slot for handle in handles]
        if given:
            self._write(self._own(state), list(range(len(slots))), slots)
            self._note_mark([handle.slot for handle in given], state)

    def load(self, handle: SnapshotHandle) -> dict[str, jax.Array]:
        """Returns copies of the slot's planes by path, batch axis 1; the slot stays as it is.

        Raises:
          StateConsumedError, IdentityError: as `free`.
        """
        self._check(handle, "load it")
        return dict(zip(self._layout.paths, self._read(handle.slot), strict=True))

    def planes(self, handle: SnapshotHandle | None) -> dict[int, jax.Array]:
        """As `load`, by the index of the plane in the layout; a fresh sequence's for None."""
        if handle is not None:
            self._check(handle, "load it")
        return dict(zip(self._indices, self._fresh(1) if handle is None else self._read(handle.slot), strict=True))

    def restore_into(
        self,
        state: PyTree,
        row: int,
        handle: SnapshotHandle,
        *,
        donate: bool = False,
        highest: int | None = None,
        writes_rest: bool = False,
    ) -> PyTree:
        """Returns `state` with the slot's planes in sequence `row`. Donates `state` if `donate`.

        Append planes are not the pool's, nor are sliding ones unless it was made to hold
        them: they stay as they are, and the row goes back to the slot's length in them. So
        the row must hold the text that was saved, or one that goes on from it; which text it
        is, a pool cannot see. The slot is not consumed.

        Args:
          state: of `B` sequences.
          row: which sequence goes back.
          handle: of the slot.
          donate: whether `state` may be consumed.
          highest: the highest row that was ever written to the row's rings, plus one; None
            assumes the worst, so that a row longer than the slot cannot go back in them.
          writes_rest: the caller writes the planes that are not the pool's, whatever the row
            holds now, so that nothing of it is checked.

        Raises:
          RollbackError: the row cannot go back to the slot's length in the planes that are
            not the pool's.
          StateConsumedError, IdentityError, GeometryError, RefusedError: as `save`.
          CapacityError: the slot's tokens do not fit the append planes of `state`.
          AliasError: two planes of a state to be donated share a buffer.
        """
        self._check(handle, "restore it")
        length = int(self._check_state(state, row)[row])
        planes = self.planes(handle)
        held = checks.host_ints(planes[self.backend.layout.position], "position")
        capacity = self.backend.layout.capacity(self.backend.layout.leaves(state))
        checks.check_room(self.backend.layout, held, np.zeros_like(held), capacity)
        if not writes_rest:
            self._check_rest(state, row, length, int(held[0]), highest)
        restored = _planes.write_row(self.backend, state, row, planes, donate=donate)
        if handle.slot in self._patched:
            mark(self._own(restored))
        return restored

    def _check_rest(self, state: PyTree, row: int, length: int, held: int, highest: int | None) -> None:
        """Raises RollbackError unless the planes that are not the pool's can go back from `length` to `held`."""
        layout = self.backend.layout
        rest = set(layout.indices("append", "sliding")) - set(self._indices)
        paths = ", ".join(f"`{layout.paths[i]}`" for i in sorted(rest))
        if rest and held > length:
            raise RollbackError(
                f"The slot holds {held} tokens, but sequence {row} only {length}: rows of {paths}, which the pool does "
                "not hold, were never written. Restore into the sequence that was saved, or write them and say "
                "`writes_rest=True`."
            )
        limit = layout.undo_limit(layout.leaves(state))
        if limit is None or not rest.intersection(layout.indices("sliding")) or held in (0, length):
            return
        most = length + limit[0] if highest is None else max(length, checks.whole(highest, "highest"))
        if most - held > limit[0]:
            raise RollbackError(
                f"The ring `{limit[1]}` is not the pool's and can go back {limit[0]} tokens from the highest row ever "
                f"written, {most - 1 if highest is not None else 'which is not known'}; the slot holds {held} tokens, "
                f"sequence {row} has {length}. Give `highest`, or add 'sliding' to the pool's `kinds`."
            )

    def copy(self, handle: SnapshotHandle) -> SnapshotHandle:
        """Claims another slot with the same planes; later writes to either leave the other alone.

        Raises:
          BudgetError: no slot is free.
          StateConsumedError, IdentityError: as `free`.
        """
        self._check(handle, "copy it")
        other = self.claim()
        try:
            self._pool = self._moved([handle.slot], [other.slot])
        except BaseException:
            self.free(other)
            raise
        if handle.slot in self._patched:
            self._patched.add(other.slot)
        return other

    def compact(self, handles: Sequence[SnapshotHandle]) -> list[SnapshotHandle]:
        """Moves the slots in use onto the lowest ones, in their order; old handles become stale.

        All move in one call: an error or an interrupt leaves every handle as it was, or,
        if the call had taken the slots, a pool that says so.

        Args:
          handles: all slots in use, in any order.

        Returns:
          the handles that take the place of `handles`, in the order given.

        Raises:
          GeometryError: `handles` are not all slots in use, each once.
          StateConsumedError, IdentityError: as `free`.
        """
        _check_list(handles)
        for handle in handles:
            self._check(handle, "compact it")
        used = self.num_slots - len(self._free)
        slots = sorted({handle.slot for handle in handles})
        if len(slots) != used or len(handles) != used:
            raise GeometryError(f"`handles` name {len(slots)} of the {used} slots in use; name each of them once.")
        changed = {*slots, *range(used)}
        generations = [number + (slot in changed) for slot, number in enumerate(self._generations)]
        free = list(range(used, self.num_slots))
        moved = self._moved(slots, list(range(used))) if self.num_slots else []
        patched = {slots.index(slot) for slot in slots if slot in self._patched}
        self._pool, self._generations, self._free, self._patched = moved, generations, free, patched
        return [
            SnapshotHandle(
                slot=slots.index(handle.slot),
                generation=self._generations[slots.index(handle.slot)],
                origin=self._origin,
            )
            for handle in handles
        ]

    # Compiled once each: which slot and which row are data.

    def _fresh(self, batch: int) -> list[jax.Array]:
        """Returns the pooled planes of `batch` empty sequences; no other plane is allocated."""
        layout, indices, init = self.backend.layout, self._indices, self.backend.functions.init

        def body(params, batch, capacity):
            leaves = layout.leaves(init(params, batch, capacity))
            return [leaves[i] for i in indices]

        run = self.backend.compile(("pool_fresh", indices), lambda: jax.jit(body, static_argnums=(1, 2)))
        return run(self._params, batch, self._capacity)

    def _write(self, source: list[jax.Array], rows: list[int], slots: list[int]) -> None:
        layout = self._layout

        def body(pool, source, rows, slots):
            return put(layout, pool, slots, take(layout, source, rows))

        run = self.backend.compile(("pool_write", self._indices), lambda: jax.jit(body, donate_argnums=(0,)))
        self._pool = run(self._leaves(), source, np.array(rows, np.int32), np.array(slots, np.int32))

    def _moved(self, sources: list[int], targets: list[int]) -> list[jax.Array]:
        """Returns the planes with slots `sources` at `targets`, all at once. Donates the pool."""
        layout = self._layout
        # The dummy moves onto itself, so that any number of slots is one compile.
        dummies = [self.num_slots] * (self.num_slots - len(sources))
        indices = (np.array([*slots, *dummies], np.int32) for slots in (sources, targets))

        def body(pool, sources, targets):
            return put(layout, pool, targets, take(layout, pool, sources))

        run = self.backend.compile(("pool_move", self._indices), lambda: jax.jit(body, donate_argnums=(0,)))
        return run(self._leaves(), *indices)

    def _read(self, slot: int) -> list[jax.Array]:
        layout = self._layout

        def body(pool, slot):
            return take(layout, pool, slot)

        run = self.backend.compile(("pool_read", self._indices), lambda: jax.jit(body))
        return run(self._leaves(), np.array([slot], np.int32))

    def check_unfenced(self) -> None:
        """Raises FencedError if a failed write has lost what the slots held."""
        self._leaves()

    def _leaves(self) -> list[jax.Array]:
        """Returns the pooled planes; raises FencedError if a failed write has lost them."""
        if any(map(is_deleted, self._pool)):
            raise FencedError(
                "This pool has lost what its slots held: a write in place failed after it had taken them, and its "
                "error came before this one. Make a new pool; nothing can be read from this one."
            )
        return self._pool

    # Checks.

    def _note_mark(self, slots: list[int], state: PyTree) -> None:
        if is_marked(self._own(state)):
            self._patched.update(slots)
        else:
            self._patched.difference_update(slots)

    def _own(self, state: PyTree) -> list[jax.Array]:
        leaves = self.backend.layout.leaves(state)
        return [leaves[i] for i in self._indices]

    def _check(self, handle: SnapshotHandle, action: str) -> None:
        _check_handle(handle)
        if handle.origin is not self._origin:
            raise IdentityError(f"{handle} is a slot of another pool, so this one cannot {action}.")
        if not self.is_live(handle):
            raise StateConsumedError(
                f"Slot {handle.slot} was freed since this handle to it was claimed (generation {handle.generation}, "
                f"now {self._generations[handle.slot]}), so this pool cannot {action}. The slot may hold another "
                "sequence by now. Was it freed twice, or kept past its eviction?"
            )

    def _check_state(self, state: PyTree, row: int) -> np.ndarray:
        lengths = _planes.check_state(self.backend.layout, state, row)
        for index, leaf in zip(self._indices, self._own(state), strict=True):
            pooled, shape = self._geometry.planes[index], list(leaf.shape)
            if len(shape) == len(pooled.shape):
                shape[pooled.plane.batch_axis or 0] = 1
            if (tuple(shape), leaf.dtype) != (pooled.shape, pooled.dtype):
                raise GeometryError(
                    f"Plane `{pooled.path}` of one sequence is {leaf.dtype}{shape} in this state, but the pool holds "
                    f"{pooled.describe()}. Was the pool made for another model or capacity?"
                )
        return lengths


def _check_list(handles: object) -> None:
    if not isinstance(handles, Sequence):
        raise GeometryError(f"`handles` must be a list of handles, but is {handles!r}.")


def _check_handle(handle: object) -> None:
    if not isinstance(handle, SnapshotHandle):
        raise GeometryError(f"A slot is named by the handle that `claim` returned, but was given {handle!r}.")


def check_backend(backend: object) -> None:
    """Raises GeometryError for what is no backend."""
    if not isinstance(backend, Backend):
        raise GeometryError(f"States are kept for a backend, but was given {backend!r}: of a model, `model.backend`.")


def _check_kinds(backend: Backend, kinds: Sequence[str]) -> None:
    check_backend(backend)
    opaque = backend.layout.indices("opaque")
    if opaque:
        raise UnsupportedError(
            f"Plane `{backend.layout.paths[opaque[0]]}` of {backend.name} is opaque: restoring a slot takes a "
            "sequence back to an earlier time, and nothing takes an opaque plane back. Declare how it changes."
        )
    wrong = set(kinds) - {*POOLED_KINDS, "sliding"}
    if wrong or "position" not in kinds:
        raise UnsupportedError(
            f"kinds={tuple(kinds)} cannot be pooled: a pool holds `position` and any of shift, recurrent and "
            "sliding, which have one size whatever a sequence's length."
        )

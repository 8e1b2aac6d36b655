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
    StateConsumedError,
    UnsupportedError,
)
from statecore._pytree import is_deleted
from statecore._typing import PyTree
from statecore.backend import Backend, checks
from statecore.state import put, take
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

    def save_rows(self, handles: Sequence[SnapshotHandle | None], state: PyTree) -> None:
        """Copies every sequence of `state` into its slot in one call. Donates nothing of `state`.

        Args:
          handles: one for each sequence; None for a padding row, which the dummy takes.
          state: of as many sequences.

        Raises:
          GeometryError: the number of handles is not the batch, or a slot is given twice.
          StateConsumedError, IdentityError, RefusedError: as `save`.
        """
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

    def restore_into(self, state: PyTree, row: int, handle: SnapshotHandle, *, donate: bool = False) -> PyTree:
        """Returns `state` with the slot's planes in sequence `row`. Donates `state` if `donate`.

        Append planes are not the pool's and stay as they are; the slot is not consumed.

        Raises:
          StateConsumedError, IdentityError, GeometryError, RefusedError: as `save`.
          AliasError: two planes of a state to be donated share a buffer.
        """
        self._check(handle, "restore it")
        self._check_state(state, row)
        self._check_room(state, handle)
        return _planes.write_row(self.backend, state, row, self.planes(handle), donate=donate)

    def _check_room(self, state: PyTree, handle: SnapshotHandle) -> None:
        """Raises CapacityError if the slot's tokens do not fit the append planes of `state`."""
        layout = self.backend.layout
        capacity, position = layout.capacity(layout.leaves(state)), self.planes(handle).get(layout.position)
        if capacity is not None and position is not None:
            held = checks.host_ints(position, "position")
            checks.check_room(layout, held, np.zeros_like(held), capacity)

    def copy(self, handle: SnapshotHandle) -> SnapshotHandle:
        """Claims another slot with the same planes; later writes to either leave the other alone.

        Raises:
          BudgetError: no slot is free.
          StateConsumedError, IdentityError: as `free`.
        """
        self._check(handle, "copy it")
        other = self.claim()
        self._move(handle.slot, other.slot)
        return other

    def compact(self, handles: Sequence[SnapshotHandle]) -> list[SnapshotHandle]:
        """Moves the slots in use onto the lowest ones, in their order; old handles become stale.

        Args:
          handles: all slots in use, in any order.

        Returns:
          the handles that take the place of `handles`, in the order given.

        Raises:
          GeometryError: `handles` are not all slots in use, each once.
          StateConsumedError, IdentityError: as `free`.
        """
        for handle in handles:
            self._check(handle, "compact it")
        used = self.num_slots - len(self._free)
        slots = sorted({handle.slot for handle in handles})
        if len(slots) != used or len(handles) != used:
            raise GeometryError(f"`handles` name {len(slots)} of the {used} slots in use; name each of them once.")
        for target, slot in enumerate(slots):
            if target != slot:
                self._move(slot, target)
        self._free = list(range(used, self.num_slots))
        for slot in {*slots, *range(used)}:
            self._generations[slot] += 1
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

    def _move(self, source: int, target: int) -> None:
        layout = self._layout

        def body(pool, source, target):
            return put(layout, pool, target, take(layout, pool, source))

        run = self.backend.compile(("pool_move", self._indices), lambda: jax.jit(body, donate_argnums=(0,)))
        self._pool = run(self._leaves(), np.array([source], np.int32), np.array([target], np.int32))

    def _read(self, slot: int) -> list[jax.Array]:
        layout = self._layout

        def body(pool, slot):
            return take(layout, pool, slot)

        run = self.backend.compile(("pool_read", self._indices), lambda: jax.jit(body))
        return run(self._leaves(), np.array([slot], np.int32))

    def _leaves(self) -> list[jax.Array]:
        """Returns the pooled planes; raises FencedError if a failed write has lost them."""
        if any(map(is_deleted, self._pool)):
            raise FencedError(
                "This pool has lost what its slots held: a write in place failed after it had taken them, and its "
                "error came before this one. Make a new pool; nothing can be read from this one."
            )
        return self._pool

    # Checks.

    def _own(self, state: PyTree) -> list[jax.Array]:
        leaves = self.backend.layout.leaves(state)
        return [leaves[i] for i in self._indices]

    def _check(self, handle: SnapshotHandle, action: str) -> None:
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


def _check_kinds(backend: Backend, kinds: Sequence[str]) -> None:
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

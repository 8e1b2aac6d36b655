"""The decode-rollback ring: which slot holds the state after how many tokens. Host only."""

import dataclasses

from statecore._errors import RollbackError
from statecore.backend import checks

# A loop in the text is noticed after a few repetitions; the last clean boundary must
# still be in the ring then.
DEFAULT_SLOTS = 8
_LADDER = (8, 4, 2, 1, 0)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One saved point: after `position` tokens, in slot `slot`."""

    position: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Ring:
    """Bookkeeping of a ring of saved states, oldest first. Immutable; holds no arrays.

    num_slots: slots there are; 0 disables the ring.
    entries: what is saved, oldest first; no two share a slot.
    next_slot: where the next save goes.
    """

    num_slots: int
    entries: tuple[Entry, ...] = ()
    next_slot: int = 0

    def record(self, position: int, slot: int | None = None) -> tuple["Ring", int]:
        """Returns the ring with a save at `position`, and its slot; its former owner is evicted.

        Args:
          position: tokens held by what is saved.
          slot: where; the next one in turn if None.

        Raises:
          RollbackError: the ring has no slots, or no such slot.
        """
        slot = self.next_slot if slot is None else checks.whole(slot, "A ring slot", least=-(2**31))
        if not 0 <= slot < self.num_slots:
            raise RollbackError(
                f"Ring slot {slot} does not exist: the ring has {self.num_slots} slots. Begin the sequence with more "
                "`ring_slots`."
            )
        # By ownership, not by age: after a truncation the oldest entry may own another slot.
        others = tuple(entry for entry in self.entries if entry.slot != slot)
        entries = (*others, Entry(position, slot))
        return self._with(entries), slot

    def slot_at(self, position: int) -> int | None:
        """Returns the slot that holds exactly `position` tokens, the newest if there are several."""
        found = [entry.slot for entry in self.entries if entry.position == position]
        return found[-1] if found else None

    def entry_in(self, slot: int) -> Entry:
        """Returns what is saved in `slot`.

        Raises:
          RollbackError: there is no such slot, or nothing was saved in it.
        """
        slot = checks.whole(slot, "A ring slot", least=-(2**31))
        if not 0 <= slot < self.num_slots:
            raise RollbackError(f"Ring slot {slot} does not exist: the ring has {self.num_slots} slots.")
        for entry in self.entries:
            if entry.slot == slot:
                return entry
        raise RollbackError(
            f"Ring slot {slot} holds nothing: it was never written, or what it held was rolled back past."
        )

    def truncated(self, length: int) -> "Ring":
        """Returns the ring without what was saved after `length` tokens.

        No survivor is evicted until every free slot was used.
        """
        kept = tuple(entry for entry in self.entries if entry.position <= length)
        return self._with(kept)

    def _with(self, entries: tuple[Entry, ...]) -> "Ring":
        """Returns a ring whose next slot is the first free one after the newest, else the oldest entry's."""
        taken = {entry.slot for entry in entries}
        after = entries[-1].slot + 1 if entries else 0
        turn = [(after + i) % self.num_slots for i in range(self.num_slots)]
        free = [slot for slot in turn if slot not in taken]
        next_slot = free[0] if free else entries[0].slot if entries else 0
        return dataclasses.replace(self, entries=entries, next_slot=next_slot)


@dataclasses.dataclass(frozen=True)
class RingDepth:
    """How many slots a ring should have, and why if there are none."""

    num_slots: int
    reason: str | None = None


def parse_ring_slots(text: str) -> int | None:
    """Returns the slots that `auto` (None) or a number from 0 to 8 asks for.

    Raises:
      RollbackError: the text is neither.
    """
    if not isinstance(text, str):
        raise RollbackError(f"Ring slots are given as text, `auto` or a number, but are {text!r}.")
    if text == "auto":
        return None
    if text.isascii() and text.isdecimal() and int(text) <= DEFAULT_SLOTS:
        return int(text)
    raise RollbackError(f"ring slots {text!r} is neither `auto` nor a number from 0 to {DEFAULT_SLOTS}.")


def choose_ring_slots(
    has_ssm_layers: bool,
    *,
    published: int | None = None,
    switch: bool | None = None,
    is_reachable: bool = True,
) -> RingDepth:
    """Returns how many ring slots a sequence gets; the first rule that applies decides.

    Args:
      has_ssm_layers: without recurrent state, the position undoes everything.
      published: a depth that was chosen explicitly or fitted to memory; never shrunk.
      switch: forces the default depth, or none.
      is_reachable: whether anything would ever roll back to a boundary.

    Raises:
      GeometryError: `published` is not a whole number.
    """
    if not has_ssm_layers:
        return RingDepth(0, "there is no recurrent state to save")
    if published is not None:
        checks.whole(published, "published")
        return RingDepth(published, None if published else "a depth of 0 was asked for")
    if switch is not None:
        return RingDepth(DEFAULT_SLOTS if switch else 0, None if switch else "switched off")
    if not is_reachable:
        return RingDepth(0, "nothing rolls back to a boundary")
    return RingDepth(DEFAULT_SLOTS)


def fit_ring_slots(most: int, *, bytes_per_slot: int, reserved_bytes: int, free_bytes: int) -> int:
    """Returns the most slots of 8, 4, 2, 1, 0, up to `most`, that fit beside what is reserved.

    0 also if nothing fits; the caller refuses then, since the reserve itself does not fit.

    Raises:
      GeometryError: a number is negative or not whole.
    """
    given = {"most": most, "bytes_per_slot": bytes_per_slot, "reserved_bytes": reserved_bytes, "free_bytes": free_bytes}
    for what, value in given.items():
        checks.whole(value, what)
    for num_slots in _LADDER:
        if num_slots <= most and reserved_bytes + num_slots * bytes_per_slot <= free_bytes:
            return num_slots
    return 0

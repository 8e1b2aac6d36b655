"""What a lookup gives: the hit, why it is no longer, and the lease that keeps it."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from statecore.store._blocks import Blocks
from statecore.store._pool import SnapshotHandle
from statecore.store._prefix_tree import Entry, PrefixTree

if TYPE_CHECKING:
    from statecore.store._prefix_cache import PrefixCache


class Kept(NamedTuple):
    """What a cache keeps of one prefix: a slot of its pool, and rows of append planes."""

    handle: SnapshotHandle
    rows: Blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheStats:
    """What has happened to a cache.

    hits: lookups that found a prefix.
    misses: lookups that found none.
    inserts: entries added.
    evictions: entries dropped to make room, or by `evict`.
    reused_tokens: tokens restored instead of read.
    """

    hits: int = 0
    misses: int = 0
    inserts: int = 0
    evictions: int = 0
    reused_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Hit:
    """What a lookup has found. It does not keep its entry; a lease does.

    num_tokens: the length of the prefix found; go on from there. 0 for a miss.
    num_matched: tokens that match any cached text, whether or not a state is kept there.
    reason: why it is a miss, or no longer than it is.
    cache: whose it is.
    entry: in the cache's tree; None for a miss.
    """

    num_tokens: int
    num_matched: int
    reason: str
    cache: "PrefixCache" = dataclasses.field(repr=False)
    entry: Entry[Kept] | None = dataclasses.field(default=None, repr=False)


class Lease:
    """Keeps one entry from being evicted until it is released; a context manager."""

    def __init__(self, tree: PrefixTree[Kept], entry: Entry[Kept] | None):
        self._tree, self._entry = tree, entry
        if entry is not None:
            tree.lease(entry)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets the entry go. A second call does nothing."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._tree.release(entry)


def explain(
    tree: PrefixTree[Kept], entry: Entry[Kept] | None, deepest: Entry[Kept] | None, num_matched: int, num_tokens: int
) -> str:
    """Returns why a lookup of `num_tokens` tokens found `entry` and nothing longer, as a sentence.

    Args:
      tree: that was searched.
      entry: what was found within the limit asked for, if anything.
      deepest: what would have been found without a limit.
      num_matched: tokens that match any cached text.
      num_tokens: tokens of the text.
    """
    found = "no state" if entry is None else f"the state of {entry.num_tokens} tokens"
    if deepest is not entry and deepest is not None:
        return (
            f"Found {found}: that of {deepest.num_tokens} of the {num_tokens} tokens is kept, but longer than was "
            "asked for. At least one token is left to feed unless `max_tokens` allows all."
        )
    if not len(tree):
        return "Found no state: the cache is empty."
    if not num_matched:
        return "Found no state: no text kept starts with this token."
    if entry is not None and entry.num_tokens == num_matched:
        return f"Found {found}, which is all that matches a text kept."
    return (
        f"Found {found}: {num_matched} of {num_tokens} tokens match a text kept, but no state is kept "
        f"{'within them' if entry is None else 'between'}. Insert states more often, or where texts branch off."
    )

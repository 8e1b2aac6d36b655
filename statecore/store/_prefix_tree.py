"""A tree of token prefixes: which entries a text starts with, and which was used longest ago."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from statecore._errors import GeometryError, StateConsumedError

T = TypeVar("T")


@dataclasses.dataclass(eq=False, slots=True)
class Node(Generic[T]):
    """A place in the tree, reached from its parent over one or more tokens.

    tokens: on the edge from the parent; empty for the root alone.
    parent: None for the root, and for what has left the tree.
    children: by the first token of their edge.
    entry: what is kept for the prefix that ends here, if anything.
    """

    tokens: tuple[int, ...] = ()
    parent: "Node[T] | None" = None
    children: "dict[int, Node[T]]" = dataclasses.field(default_factory=dict)
    entry: "Entry[T] | None" = None


@dataclasses.dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """What is kept for one prefix.

    value: the caller's.
    num_tokens: the length of the prefix.
    last_used: when it was inserted or touched; no two entries share a time.
    num_leases: how many hold it; while any does, it is no victim.
    """

    value: T
    num_tokens: int
    last_used: int = 0
    num_leases: int = 0
    node: Node[T] | None = dataclasses.field(default=None, repr=False)

    @property
    def is_alive(self) -> bool:
        """Whether the entry is still in its tree."""
        return self.node is not None

    def check_alive(self) -> Node[T]:
        """Returns where the entry is; raises StateConsumedError if it was evicted."""
        if self.node is None:
            raise StateConsumedError(
                f"The entry of {self.num_tokens} tokens was evicted. Look the text up again, and lease the hit if it "
                "has to outlive other inserts."
            )
        return self.node


class PrefixTree(Generic[T]):
    """Entries by token prefix, at most one for each. Holds nothing of the device.

    An edge carries as many tokens as nothing branches off from or ends within, and is
    split when something does.
    """

    def __init__(self):
        self._root: Node[T] = Node()
        self._entries: dict[Entry[T], None] = {}  # a set that keeps its order
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(tuple(self._entries))

    def get(self, tokens: Sequence[int]) -> Entry[T] | None:
        """Returns the entry of exactly this prefix, untouched."""
        entry, _ = self.find(tokens)
        return entry if entry is not None and entry.num_tokens == len(tokens) else None

    def find(self, tokens: Sequence[int], max_tokens: int | None = None) -> tuple[Entry[T] | None, int]:
        """Returns the deepest entry that `tokens` starts with, and how many tokens match at all.

        No recency changes: only what is used should be touched, and the caller knows.

        Args:
          tokens: the text.
          max_tokens: the longest prefix wanted; that many tokens still match beyond it.

        Returns:
          the entry, None if there is none; the tokens that match any cached text, which
          may be more than the entry has.
        """
        node, matched, deepest = self._root, 0, None
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None:
                break
            shared = _shared(child.tokens, tokens, matched)
            matched += shared
            if shared < len(child.tokens):
                break
            node = child
            if node.entry is not None and (max_tokens is None or matched <= max_tokens):
                deepest = node.entry
        return deepest, matched

    def insert(self, tokens: Sequence[int], value: T) -> Entry[T]:
        """Adds an entry, as the one used last, splitting an edge where it ends or branches off.

        Raises:
          GeometryError: the prefix is empty, or has an entry already.
        """
        if not len(tokens):
            raise GeometryError("An entry needs at least one token: the empty prefix is what `init` makes.")
        node, used = self._root, 0
        while used < len(tokens):
            child = node.children.get(tokens[used])
            if child is None:
                child = node.children[tokens[used]] = Node(tokens=tuple(tokens[used:]), parent=node)
            shared = _shared(child.tokens, tokens, used)
            node = child if shared == len(child.tokens) else _split(child, shared)
            used += shared
        if node.entry is not None:
            raise GeometryError(f"The prefix of {len(tokens)} tokens has an entry already; there is one a prefix.")
        node.entry = Entry(value=value, num_tokens=len(tokens), node=node)
        self._entries[node.entry] = None
        self.touch(node.entry)
        return node.entry

    def touch(self, entry: Entry[T]) -> None:
        """Makes `entry` the one used last."""
        self._clock += 1
        entry.last_used = self._clock

    def lease(self, entry: Entry[T]) -> None:
        """Keeps `entry` from being evicted until as many calls of `release`."""
        entry.check_alive()
        entry.num_leases += 1

    def release(self, entry: Entry[T]) -> None:
        """Gives one lease back."""
        assert entry.num_leases > 0  # a lease is released once, by its owner
        entry.num_leases -= 1

    def victim(self) -> Entry[T] | None:
        """Returns the entry used longest ago of those nobody leases; None if there is none."""
        return min((entry for entry in self._entries if not entry.num_leases), key=_last_used, default=None)

    def remove(self, entry: Entry[T]) -> None:
        """Takes an entry out, with the edges that lead to nothing else.

        Raises:
          StateConsumedError: it has been taken out before.
        """
        node = entry.check_alive()
        # First out of the list: an interrupt may leave an edge too many, never a dead victim.
        del self._entries[entry]
        node.entry = entry.node = None
        while node.parent is not None and node.entry is None and not node.children:
            parent, node.parent = node.parent, None
            del parent.children[node.tokens[0]]
            node = parent
        if node.parent is not None and node.entry is None and len(node.children) == 1:
            _merge(node)


def _last_used(entry: Entry) -> int:
    return entry.last_used


def _shared(edge: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    """Returns how many tokens of `edge` stand in `tokens` from `start` on."""
    most = min(len(edge), len(tokens) - start)
    return next((i for i in range(most) if edge[i] != tokens[start + i]), most)


def _split(node: Node[T], at: int) -> Node[T]:
    """Puts a node `at` tokens into the edge of `node` and returns it; entries stay where they are."""
    parent = node.parent
    assert parent is not None and 0 < at < len(node.tokens)
    middle = Node(tokens=node.tokens[:at], parent=parent, children={node.tokens[at]: node})
    parent.children[middle.tokens[0]] = middle
    node.tokens, node.parent = node.tokens[at:], middle
    return middle


def _merge(node: Node[T]) -> None:
    """Joins a node that keeps nothing with its only child."""
    (child,) = node.children.values()
    parent = node.parent
    assert parent is not None
    child.tokens, child.parent = node.tokens + child.tokens, parent
    parent.children[child.tokens[0]] = child
    node.parent = None

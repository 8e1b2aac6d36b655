"""The mark of a patched state: arrays that no tokens made, remembered as long as they live."""

import weakref

import jax

from statecore._pytree import is_traced
from statecore._typing import PyTree

# By identity, since arrays neither hash nor compare as one; an entry goes with its array.
_MARKED: dict[int, weakref.ref] = {}


def mark(tree: PyTree) -> None:
    """Marks all arrays of `tree` as not made by the tokens that their state is said to hold.

    The mark is of the array objects, not of their bits: what is computed or copied from
    them is not marked, unless whoever does it marks it too. Inside a trace nothing is
    marked, since there is no array yet.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not is_traced(leaf):
            key = id(leaf)
            _MARKED[key] = weakref.ref(leaf, lambda _, key=key: _MARKED.pop(key, None))


def is_marked(tree: PyTree) -> bool:
    """Returns whether any array of `tree` was marked. Reads no values."""
    return any(_is_marked(leaf) for leaf in jax.tree.leaves(tree))


def _is_marked(leaf: object) -> bool:
    held = _MARKED.get(id(leaf))
    return held is not None and held() is leaf

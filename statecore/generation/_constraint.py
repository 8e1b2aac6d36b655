"""What the next token may be: the protocol, a choice among sequences, and masks for a window."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from statecore._errors import GeometryError, UnsupportedError
from statecore.backend import Tokenizer, checks


class Constraint(Protocol):
    """Says which tokens may follow, for one sequence. Advanced in place; copied into snapshots."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, so that the sequence has ended."""
        ...

    def mask(self) -> np.ndarray:
        """Returns `[V]` bool, the tokens that may follow; none once it is complete."""
        ...

    def advance(self, token: int) -> None:
        """Takes a token that was emitted. Refuses, unchanged, one that the mask forbids."""
        ...

    def copy(self) -> "Constraint":
        """Returns an independent copy at the same point."""
        ...

    def nbytes(self) -> int | None:
        """Returns the bytes a copy takes; None if unknown: then no snapshot can be taken, but steps can."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trie:
    """Sequences that share their beginnings.

    children: for each node, the nodes that its tokens lead to; node 0 is the root.
    ends: for each node, whether a sequence ends there.
    """

    children: list[dict[int, int]]
    ends: list[bool]


class OneOf:
    """Allows one of some token sequences: a constraint.

    The sequence has ended when a choice is whole and no longer one begins with it. A
    choice that begins another needs an end token, which then says that it was meant.

    Args:
      choices: the sequences, each of at least one token.
      vocab_size: V.
      end_tokens: allowed where a choice is whole.

    Raises:
      GeometryError: no choice, an empty one, or a token outside the vocabulary.
      UnsupportedError: a choice begins another, and there is no end token to tell them apart.
    """

    def __init__(self, choices: Iterable[Sequence[int]], *, vocab_size: int, end_tokens: Iterable[int] = ()):
        rows = [_checked(choice, vocab_size, "A choice") for choice in choices]
        self._vocab_size, self._end_tokens = vocab_size, _checked(end_tokens, vocab_size, "end_tokens")
        if not rows or not all(rows):
            raise GeometryError(f"OneOf needs at least one choice, each of at least one token, but was given {rows}.")
        self._trie = _trie(rows)
        self._node: int | None = 0  # None: an end token was taken
        pairs = zip(self._trie.ends, self._trie.children, strict=True)
        if not self._end_tokens and any(ends and children for ends, children in pairs):
            raise UnsupportedError(
                "One choice begins another, so nothing tells whether the shorter one has ended. Give `end_tokens`."
            )

    @classmethod
    def texts(
        cls, texts: Iterable[str], tokenizer: Tokenizer, *, vocab_size: int, end_tokens: Iterable[int] = ()
    ) -> "OneOf":
        """Returns a choice among texts, each as the tokenizer encodes it and in no other tokens.

        Raises:
          UnsupportedError: a text comes back from the tokenizer as another.
        """
        texts = list(texts)
        choices = [tokenizer.encode(text) for text in texts]
        for text, choice in zip(texts, choices, strict=True):
            if tokenizer.decode(choice) != text:
                raise UnsupportedError(
                    f"{text!r} cannot be a choice: its tokens decode to {tokenizer.decode(choice)!r}."
                )
        return cls(choices, vocab_size=vocab_size, end_tokens=end_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether a choice is whole and nothing may follow."""
        return self._node is None or not self._trie.children[self._node]

    def mask(self) -> np.ndarray:
        """Returns `[V]` bool, the tokens that may follow."""
        mask = np.zeros(self._vocab_size, bool)
        mask[self._following()] = True
        return mask

    def advance(self, token: int) -> None:
        """Takes a token; raises UnsupportedError, unchanged, for one that the mask forbids."""
        if token not in self._following():
            raise UnsupportedError(f"Token {token} may not follow; one of {sorted(self._following())} may.")
        assert self._node is not None
        # An end token that also goes on with a longer choice goes on.
        self._node = self._trie.children[self._node].get(token)

    def copy(self) -> "OneOf":
        """Returns an independent copy at the same point, which shares the choices."""
        other = object.__new__(OneOf)
        other.__dict__.update(self.__dict__)
        return other

    def nbytes(self) -> int:
        """Returns the bytes of what a copy does not share: the place in the choices."""
        return 8

    def _following(self) -> list[int]:
        if self._node is None or self.is_complete:
            return []
        return [*self._trie.children[self._node], *(self._end_tokens if self._trie.ends[self._node] else ())]


def _checked(tokens: Iterable[int], vocab_size: int, what: str) -> list[int]:
    found = [checks.whole(token, f"A token of {what}") for token in tokens]
    if any(token >= vocab_size for token in found):
        raise GeometryError(f"{what} {found} has tokens outside the vocabulary of {vocab_size}.")
    return found


def _trie(rows: list[list[int]]) -> _Trie:
    trie = _Trie(children=[{}], ends=[False])
    for row in rows:
        node = 0
        for token in row:
            if token not in trie.children[node]:
                trie.children[node][token] = len(trie.children)
                trie.children.append({})
                trie.ends.append(False)
            node = trie.children[node][token]
        trie.ends[node] = True
    return trie


def step_masks(constraints: Sequence[Constraint | None], vocab_size: int) -> np.ndarray | None:
    """Returns what each sequence may emit next, `[B, 1, V]` bool for `draw`; None if nothing is constrained.

    Raises:
      GeometryError: a mask is not of this vocabulary.
    """
    if all(constraint is None for constraint in constraints):
        return None
    free = np.ones(vocab_size, bool)
    return np.stack([free if one is None else _mask(one, vocab_size) for one in constraints])[:, None]


def window_masks(
    constraints: Sequence[Constraint | None], window: np.ndarray, num_valid: np.ndarray, vocab_size: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns what each row of a window may emit, and which rows can matter. Advances nothing.

    A row can matter if it is valid, the constraint allows the drafts before it, and it is
    not complete by then. The live rows of a sequence come first; keep no row after them.

    Args:
      constraints: one a sequence, None for none.
      window: `[B, K]` int, anchor first. The constraint has taken the anchor already.
      num_valid: `[B]` int, valid rows.
      vocab_size: V.

    Returns:
      allowed: `[B, K, V]` bool, everything in rows that cannot matter; None if nothing is constrained.
      live: `[B, K]` bool.

    Raises:
      GeometryError: a mask is not of this vocabulary.
    """
    live = np.arange(window.shape[1]) < np.asarray(num_valid)[:, None]
    if all(constraint is None for constraint in constraints):
        return None, live
    allowed = np.ones((*window.shape, vocab_size), bool)
    for row, constraint in enumerate(constraints):
        if constraint is None or not live[row].any():
            continue
        masks = _masks_along(constraint, window[row, 1 : num_valid[row]].tolist(), vocab_size)
        allowed[row, : len(masks)] = masks
        live[row, len(masks) :] = False
    return allowed, live


def _masks_along(constraint: Constraint, drafts: list[int], vocab_size: int) -> np.ndarray:
    """Returns the masks before each draft and after the last, `[N, V]`, up to the first that cannot follow."""
    masks, ahead = [], constraint
    for draft in [*drafts, None]:
        if ahead.is_complete:
            break
        masks.append(_mask(ahead, vocab_size))
        if draft is None or not 0 <= draft < vocab_size or not masks[-1][draft]:
            break
        ahead = constraint.copy() if ahead is constraint else ahead
        ahead.advance(draft)
    return np.array(masks, bool).reshape(-1, vocab_size)


def _mask(constraint: Constraint, vocab_size: int) -> np.ndarray:
    mask = np.asarray(constraint.mask())
    if mask.shape != (vocab_size,) or mask.dtype != bool:
        raise GeometryError(
            f"A constraint's mask must be bool[{vocab_size}], but is {mask.dtype}{list(mask.shape)}. Was it made for "
            "another model?"
        )
    return mask

"""Tokens that a user has chosen to come next, one at most a sequence."""

import dataclasses

import numpy as np

from statecore._errors import GeometryError, LifecycleError, UnsupportedError
from statecore.backend import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced:
    """The pending forced token of each sequence; immutable, so that a snapshot may share it.

    It is consumed by the next draw of its sequence, through the ordinary path: a sampled
    run spends the draw of that output on it, so that later draws are as if it had been
    drawn; a greedy run draws nothing.

    tokens: one a sequence, None where nothing is pending.
    """

    tokens: tuple[int | None, ...]

    @classmethod
    def none(cls, batch: int) -> "Forced":
        """Returns nothing pending for `batch` sequences."""
        return cls(tokens=(None,) * batch)

    def force(self, row: int, token: int, *, vocab_size: int, allowed: np.ndarray | None = None) -> "Forced":
        """Returns this with `token` pending for sequence `row`.

        Args:
          row: which sequence.
          token: what it emits next.
          vocab_size: V.
          allowed: `[V]` bool, what the sequence's constraint allows now; None for everything.

        Raises:
          GeometryError: there is no such sequence or token.
          LifecycleError: a token is pending already.
          UnsupportedError: the constraint does not allow the token.
        """
        row = self._row(row)
        token = checks.whole(token, "A forced token")
        if token >= vocab_size:
            raise GeometryError(f"Token {token} cannot be forced: the vocabulary has {vocab_size} tokens.")
        if self.tokens[row] is not None:
            raise LifecycleError(
                f"Token {self.tokens[row]} is pending for sequence {row} already. Emit it, or clear it, before {token} "
                "is forced."
            )
        if allowed is not None and not allowed[token]:
            raise UnsupportedError(f"Token {token} cannot be forced on sequence {row}: its constraint forbids it.")
        return self._with(row, token)

    def cleared(self, row: int) -> "Forced":
        """Returns this with nothing pending for sequence `row`; no history changes.

        Raises:
          GeometryError: there is no such sequence.
        """
        return self._with(self._row(row), None)

    def consumed(self, num_kept: np.ndarray) -> "Forced":
        """Returns this without the tokens of sequences that have emitted: `num_kept` `[B]` above 0."""
        pairs = zip(self.tokens, num_kept, strict=True)
        return Forced(tokens=tuple(None if kept > 0 else token for token, kept in pairs))

    def array(self) -> np.ndarray | None:
        """Returns `[B]` int32 for `draw`, -1 where nothing is pending; None if nothing is."""
        if all(token is None for token in self.tokens):
            return None
        return np.array([-1 if token is None else token for token in self.tokens], np.int32)

    def _row(self, row: int) -> int:
        row = checks.whole(row, "A sequence")
        if row >= len(self.tokens):
            raise GeometryError(f"There is no sequence {row}: the batch has {len(self.tokens)}.")
        return row

    def _with(self, row: int, token: int | None) -> "Forced":
        return Forced(tokens=(*self.tokens[:row], token, *self.tokens[row + 1 :]))

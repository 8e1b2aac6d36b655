"""What a draft is: something that guesses the tokens to come."""

from collections.abc import Sequence
from typing import Protocol


class Draft(Protocol):
    """Guesses tokens; a wrong guess costs time, never a wrong token.

    num_draft: the most tokens guessed at once; a window has one row more, the anchor.
    """

    @property
    def num_draft(self) -> int: ...

    def propose(self, history: Sequence[int], limit: int) -> list[int]:
        """Returns up to `limit` tokens that may follow `history`, or none."""
        ...

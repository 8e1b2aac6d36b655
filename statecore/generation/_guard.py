"""A guard against texts that repeat themselves."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopGuard:
    """Notices a text that repeats itself.

    max_period: the longest stretch that is looked for, in tokens.
    num_repeats: how often in a row it must stand at the end.
    """

    max_period: int = 32
    num_repeats: int = 3

    def period(self, output: list[int]) -> int | None:
        """Returns the length of the stretch that the text ends in repeating; None if it does not."""
        for period in range(1, self.max_period + 1):
            length = period * self.num_repeats
            if length > len(output):
                return None
            tail = output[-length:]
            if tail == tail[:period] * self.num_repeats:
                return period
        return None

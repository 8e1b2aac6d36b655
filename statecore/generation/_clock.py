"""Where the time of a speculative run goes, for who asks; nothing is awaited for who does not."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax


@dataclasses.dataclass(kw_only=True)
class Clock:
    """Seconds of each part of a round, and what each round came to.

    seconds: by part: `draft`, `verify`, `commit`; the work of the device is awaited.
    rounds: of each verify, the drafts and the tokens emitted, over all sequences.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    rounds: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[list[Any]]:
        """Times what is inside, and what it appends to the list until it is ready."""
        made: list[Any] = []
        start = time.perf_counter()
        yield made
        jax.block_until_ready(made)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def timed(clock: Clock | None, name: str) -> Any:
    """Returns `clock.part(name)`, or nothing to wait for without a clock."""
    return nullcontext([]) if clock is None else clock.part(name)

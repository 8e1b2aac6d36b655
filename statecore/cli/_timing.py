"""Times of two things run in turn, for the demo's cost table."""

import statistics
import time
from collections.abc import Callable

import jax


def paired(first: Callable[[], object], second: Callable[[], object], pairs: int = 15) -> dict[str, float]:
    """Returns the median times in microseconds, and the median ratio of `first` to `second`."""
    times = [(_once(first), _once(second)) for _ in range(pairs + 2)][2:]
    return {
        "microseconds": round(statistics.median(a for a, _ in times) * 1e6, 1),
        "against_microseconds": round(statistics.median(b for _, b in times) * 1e6, 1),
        "ratio": round(statistics.median(a / b for a, b in times), 3),
    }


def _once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start

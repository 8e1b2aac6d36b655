"""The paired-ratio harness: two things run in turn in one process, and their ratio.

On a machine that does other work too, the seconds of one thing say little: the same copy
may take twice as long a minute later. What holds is the ratio of two things that ran
next to each other, so A and B take turns (A B A B ...) and each pair gives one ratio.
"""

import dataclasses
import datetime
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import statecore as sc

MIN_PAIRS = 15
_NUM_WARMUP = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time.

    what: for the reader of the table.
    call: what is timed; takes what `setup` made, or nothing without one.
    setup: makes the argument of one call, such as a state to donate; never timed.
    """

    what: str
    call: Callable[..., Any]
    setup: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """The time of A over the time of B: below 1, A is the faster.

    name: of the measurement.
    a: what A is.
    b: what B is.
    median, p10, p90: of the ratio over the pairs.
    seconds_a, seconds_b: medians, for one call.
    num_pairs: pairs measured after warm-up.
    goal: what the ratio should be, as text; empty if nothing is asked of it.
    """

    name: str
    a: str
    b: str
    median: float
    p10: float
    p90: float
    seconds_a: float
    seconds_b: float
    num_pairs: int
    goal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The seconds of one call, which hold for one machine at one hour.

    name: of the measurement.
    what: what was timed.
    median, p10, p90: seconds of one call.
    num_runs: runs measured after warm-up.
    goal: what the time should be, as text; empty if nothing is asked of it.
    """

    name: str
    what: str
    median: float
    p10: float
    p90: float
    num_runs: int
    goal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """A number that is the same on every machine or nearly so: bytes, compiles, a difference.

    name: of the fact.
    what: what was counted.
    value: the number.
    goal: what it should be, as text; empty if nothing is asked of it.
    """

    name: str
    what: str
    value: float
    goal: str = ""


Record = Ratio | Timing | Fact


def compare(name: str, a: Case, b: Case, *, num_pairs: int = MIN_PAIRS, repeat: int = 1, goal: str = "") -> Ratio:
    """Runs `a` and `b` in turn and returns the ratio of their times.

    Args:
      name: of the measurement.
      a: the case in question.
      b: what it is measured against.
      num_pairs: pairs after warm-up, at least 15.
      repeat: calls in one timing, for what takes microseconds; only the last result is
        awaited, so it is not for work on the device.
      goal: what the ratio should be.

    Raises:
      ValueError: fewer than 15 pairs.
    """
    seconds = _seconds([a, b], num_pairs, repeat)
    p10, median, p90 = np.percentile(seconds[:, 0] / seconds[:, 1], [10, 50, 90]).tolist()
    seconds_a, seconds_b = np.median(seconds, axis=0).tolist()
    return Ratio(
        name=name,
        a=a.what,
        b=b.what,
        median=median,
        p10=p10,
        p90=p90,
        seconds_a=seconds_a,
        seconds_b=seconds_b,
        num_pairs=num_pairs,
        goal=goal,
    )


def measure(name: str, case: Case, *, num_runs: int = MIN_PAIRS, repeat: int = 1, goal: str = "") -> Timing:
    """Returns the time of one case, for what has nothing to be compared with. See `compare`."""
    seconds = _seconds([case], num_runs, repeat)
    p10, median, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
    return Timing(name=name, what=case.what, median=median, p10=p10, p90=p90, num_runs=num_runs, goal=goal)


def _seconds(cases: Sequence[Case], num_turns: int, repeat: int) -> np.ndarray:
    """Returns the seconds of one call, `[turns, cases]`; the cases take turns."""
    if num_turns < MIN_PAIRS:
        raise ValueError(
            f"{num_turns} pairs were asked for, but a median with its p10 and p90 needs at least {MIN_PAIRS}."
        )
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}, but a timing needs at least 1 call.")
    for case in list(cases) * _NUM_WARMUP:
        _one_timing(case, repeat)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # as `timeit` does: a collection would land in one timing of a pair
    try:
        return np.array([[_one_timing(case, repeat) for case in cases] for _ in range(num_turns)])
    finally:
        if was_enabled:
            gc.enable()


def _one_timing(case: Case, repeat: int) -> float:
    arguments: list[tuple] = [()] * repeat
    if case.setup is not None:
        arguments = [(jax.block_until_ready(case.setup()),) for _ in range(repeat)]
    result = None
    start = time.perf_counter()
    for argument in arguments:
        result = case.call(*argument)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeat


def print_records(console: Console, records: Sequence[Record]) -> None:
    """Prints ratios, times and facts as a table each."""
    ratios = [record for record in records if isinstance(record, Ratio)]
    timings = [record for record in records if isinstance(record, Timing)]
    if ratios:
        console.print(_ratio_table(ratios))
    if timings:
        console.print(_timing_table(timings))
    facts = [record for record in records if isinstance(record, Fact)]
    if facts:
        console.print(_fact_table(facts))


def _ratio_table(ratios: Sequence[Ratio]) -> Table:
    table = Table(title="Time of A over time of B: below 1, A is the faster")
    for heading in ("name", "A", "B"):
        table.add_column(heading)
    for heading in ("ratio", "p10", "p90", "A takes", "B takes", "pairs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("goal")
    for row in ratios:
        spread = [f"{value:.3g}" for value in (row.median, row.p10, row.p90)]
        seconds = [format_seconds(row.seconds_a), format_seconds(row.seconds_b)]
        table.add_row(row.name, row.a, row.b, *spread, *seconds, str(row.num_pairs), row.goal)
    return table


def _timing_table(timings: Sequence[Timing]) -> Table:
    table = Table(title="Time of one call, on this machine, now")
    table.add_column("name")
    table.add_column("what")
    for heading in ("median", "p10", "p90", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("goal")
    for row in timings:
        spread = [format_seconds(value) for value in (row.median, row.p10, row.p90)]
        table.add_row(row.name, row.what, *spread, str(row.num_runs), row.goal)
    return table


def _fact_table(facts: Sequence[Fact]) -> Table:
    table = Table(title="What was counted")
    table.add_column("name")
    table.add_column("what")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("goal")
    for row in facts:
        table.add_row(row.name, row.what, f"{row.value:.3g}", row.goal)
    return table


def format_seconds(seconds: float) -> str:
    """Returns seconds as text in s, ms or us, three digits."""
    scale, unit = next((pair for pair in ((1.0, "s"), (1e3, "ms")) if seconds * pair[0] >= 1), (1e6, "us"))
    return f"{seconds * scale:.3g} {unit}"


def environment() -> dict[str, Any]:
    """Returns what the numbers depend on, less what would name the machine."""
    return {
        "statecore": sc.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {jax.default_backend()}",
        "cpu_count": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, records: Sequence[Record]) -> None:
    """Writes the records and their environment as JSON; seconds are plain numbers."""
    rows = [{"kind": type(record).__name__.lower()} | dataclasses.asdict(record) for record in records]
    path.write_text(json.dumps({"environment": environment(), "records": rows}, indent=2) + "\n")

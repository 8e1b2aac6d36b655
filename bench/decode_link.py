"""The other process of `bench/decode.py`, and ratios of what the two take in turn."""

import dataclasses
import gc
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.harness import MIN_PAIRS, Case, Ratio

PEER = Path(__file__).with_name("decode_peer.py")
_NUM_WARMUP = 2


class PeerError(RuntimeError):
    """The other process ended, or answered something else than JSON."""


class Peer:
    """A process that answers requests, one JSON object a line; it ends with the `with` block."""

    def __init__(self, command: Sequence[str]):
        """Starts `command`."""
        self._command = list(command)
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Peer":
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the process: its input ends, and it is killed if that does not do."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, name: str, **options: Any) -> dict[str, Any]:
        """Sends a request and returns its answer.

        Raises:
          PeerError: the process has ended, or its answer is no JSON.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps({"do": name, **options}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            return json.loads(line)
        except (BrokenPipeError, json.JSONDecodeError) as error:
            said = f"answered {line!r}" if line else f"ended with status {self._process.wait()}"
            raise PeerError(
                f"`{' '.join(self._command)}` {said} when asked to {name}. Its own message stands above; has its "
                "environment torch and transformers?"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerCase:
    """One thing that the other process times.

    what: for the reader of the table.
    call: asks for it once and returns the seconds by the clock of that process.
    """

    what: str
    call: Callable[[], float]


def compare_across(
    name: str, own: Case, peer: PeerCase, *, num_pairs: int = MIN_PAIRS, num_warmup: int = _NUM_WARMUP, goal: str = ""
) -> Ratio:
    """Runs `own` here and `peer` there in turn, never both at once, and returns the ratio of their times.

    Raises:
      ValueError: fewer than 15 pairs.
    """
    if num_pairs < MIN_PAIRS:
        raise ValueError(f"{num_pairs} pairs were asked for, but a median with p10 and p90 needs {MIN_PAIRS}.")
    for _ in range(num_warmup):
        _seconds(own)
        peer.call()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        seconds = np.array([(_seconds(own), peer.call()) for _ in range(num_pairs)])
    finally:
        if was_enabled:
            gc.enable()
    p10, median, p90 = np.percentile(seconds[:, 0] / seconds[:, 1], [10, 50, 90]).tolist()
    seconds_a, seconds_b = np.median(seconds, axis=0).tolist()
    return Ratio(
        name=name,
        a=own.what,
        b=peer.what,
        median=median,
        p10=p10,
        p90=p90,
        seconds_a=seconds_a,
        seconds_b=seconds_b,
        num_pairs=num_pairs,
        goal=goal,
    )


def _seconds(case: Case) -> float:
    argument = () if case.setup is None else (jax.block_until_ready(case.setup()),)
    start = time.perf_counter()
    jax.block_until_ready(case.call(*argument))
    return time.perf_counter() - start

"""What speculation did in a stretch of a run, and where its time went."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from statecore.generation import Clock, Draft, Generation, StatefulDraft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telemetry:
    """A stretch of a speculative run, on rounds of the host.

    num_tokens: emitted, over all sequences.
    seconds: in all.
    seconds_draft, seconds_verify, seconds_commit: of the parts, each awaited; the rest drew and took tokens.
    drafted, emitted, sequences: of each verify, over its sequences: drafts, tokens emitted, sequences that had rows.
    drafted_at, accepted_at: at each place of a window, as of `Speculation`.
    mode: of the verifies.
    """

    num_tokens: int
    seconds: float
    seconds_draft: float
    seconds_verify: float
    seconds_commit: float
    drafted: tuple[int, ...]
    emitted: tuple[int, ...]
    sequences: tuple[int, ...]
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    mode: str | None

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafts accepted in each verify."""
        return tuple(tokens - own for tokens, own in zip(self.emitted, self.sequences, strict=True))

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted a second, over all sequences."""
        return self.num_tokens / self.seconds if self.seconds else float("nan")

    @property
    def rate(self) -> float:
        """Drafts accepted of those verified; NaN if there were none."""
        return sum(self.accepted) / sum(self.drafted) if any(self.drafted) else float("nan")


def run_measured(
    gen: Generation, num_tokens: int, draft: Draft | StatefulDraft, *, progress: bool = False
) -> tuple[list, Telemetry]:
    """Emits as `gen.run` does, by rounds of the host, and measures them.

    The loop on the device is faster and cannot be looked into, so it is not used here.

    Args:
      gen: which emits.
      num_tokens: for each sequence.
      draft: who guesses.
      progress: whether a bar shows how many tokens were emitted, and how many drafts accepted.

    Returns:
      the tokens, as `gen.run` does, and what was measured.
    """
    clock = Clock()
    drafted_at, accepted_at = gen.speculation.drafted_at, gen.speculation.accepted_at
    starts = [len(row) for row in gen._run.outputs]
    start = time.perf_counter()
    with _bar(num_tokens, progress) as told:
        try:
            gen._run.clock = clock
            while gen.num_left and (done := _most(gen, starts)) < num_tokens:
                gen.run(min(num_tokens - done, draft.num_draft + 1), speculate=draft)
                told(_most(gen, starts), clock)
                if gen.control.is_pause_requested:
                    break
        finally:
            gen._run.clock = None
    seconds = time.perf_counter() - start
    tokens = [row[begun:] for row, begun in zip(gen._run.outputs, starts, strict=True)]
    drafted, emitted, sequences = zip(*clock.rounds, strict=True) if clock.rounds else ((), (), ())
    return gen._shaped(tokens), Telemetry(
        num_tokens=sum(map(len, tokens)),
        seconds=seconds,
        seconds_draft=clock.seconds.get("draft", 0.0),
        seconds_verify=clock.seconds.get("verify", 0.0),
        seconds_commit=clock.seconds.get("commit", 0.0),
        drafted=drafted,
        emitted=emitted,
        sequences=sequences,
        drafted_at=_less(gen.speculation.drafted_at, drafted_at),
        accepted_at=_less(gen.speculation.accepted_at, accepted_at),
        mode=gen.speculation.mode,
    )


def _most(gen: Generation, starts: list[int]) -> int:
    return max(len(row) - start for row, start in zip(gen._run.outputs, starts, strict=True))


def _less(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - (before[i] if i < len(before) else 0) for i, a in enumerate(after))


@contextmanager
def _bar(num_tokens: int, is_shown: bool) -> Iterator[Any]:
    """Yields a function of tokens emitted and the clock, which moves the bar if there is one."""
    if not is_shown:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=num_tokens)

        def told(done: int, clock: Clock) -> None:
            drafted = sum(row[0] for row in clock.rounds)
            accepted = sum(row[1] - row[2] for row in clock.rounds)
            rate = f"{accepted / drafted:.0%} of {drafted} drafts accepted" if drafted else "no drafts yet"
            bar.update(task, completed=done, description=rate)

        yield told

"""One round of a run: logits to tokens, and tokens into the run."""

import jax
import numpy as np

from statecore.generation._constraint import step_masks
from statecore.generation._row import Row, Taken
from statecore.generation._run import Run, Unread
from statecore.generation._sampler_state import advance
from statecore.generation._sampling import Draws, draw, drawn_tokens
from statecore.runtime import Runtime


def plain_round(runtime: Runtime, run: Run, limits: list[int]) -> None:
    """Emits one token of each sequence whose limit is above 0; the others stay as they are."""
    live = np.array(limits) > 0
    allowed = step_masks(run.constraints, runtime.vocab_size)
    if run.unread is None:
        logits = runtime.step(run.pending(), live=None if live.all() else live)
        # Until tokens are drawn of them: whatever fails in between, a next call goes on from here.
        run.unread = Unread(logits, live)
    logits, live = run.unread
    draws = draw_rows(run, logits, None, allowed, live[:, None])
    chosen = drawn_tokens(draws, live[:, None])
    taken = look_ahead(run, chosen, live.astype(np.int32))
    run.unread = None
    take(run, chosen, taken, draws)


def draw_rows(
    run: Run, logits: jax.Array, window: np.ndarray | None, allowed: np.ndarray | None, live: np.ndarray
) -> Draws:
    """Returns what follows `logits`, `[B, V]` or `[B, K, V]`; only `live` `[B, K]` rows matter."""
    emitted = np.array([len(row.output) for row in run.rows], np.int32)
    return draw(
        run.sampler,
        run.sampling,
        emitted[:, None] + np.arange(live.shape[1], dtype=np.int32),
        logits,
        window=window,
        allowed=allowed,
        forced=run.forced.array(),
        live=live,
        num_logprobs=run.num_logprobs,
    )


def look_ahead(run: Run, chosen: np.ndarray, counts: np.ndarray) -> list[Taken]:
    """Returns what each sequence would take of `counts` `[B]` tokens of `chosen` `[B, K]`."""
    breaks_at = None if run.saves is None and run.guard is None else run.breaks_at
    pairs = zip(run.rows, chosen, counts, strict=True)
    return [row.look_ahead(tokens[:count].tolist(), run.max_tokens, breaks_at) for row, tokens, count in pairs]


def take(run: Run, chosen: np.ndarray, taken: list[Taken], draws: Draws) -> None:
    """Appends to each sequence what it takes of `chosen` `[B, K]`, and follows with the sampler."""
    counts = np.array([one.num_tokens for one in taken], np.int32)
    run.sampling, run.forced = advance(run.sampling, chosen, counts, draws.mus), run.forced.consumed(counts)
    for number, (row, one) in enumerate(zip(run.rows, taken, strict=True)):
        if one.num_tokens:
            _record_logprobs(row, draws, number, one.num_tokens)
            row.take(chosen[number].tolist(), one)


def _record_logprobs(row: Row, draws: Draws, number: int, count: int) -> None:
    if draws.logprobs is None:
        return
    row.logprobs += np.array(draws.logprobs)[number, :count].tolist()
    if draws.top is not None:
        tokens, logprobs = (np.array(leaf)[number, :count].tolist() for leaf in draws.top)
        row.top += [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]

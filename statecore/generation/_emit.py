"""The loop of a generation: rounds until enough was emitted, or somebody asks to stop."""

import dataclasses
from collections.abc import Iterator
from numbers import Integral
from typing import TYPE_CHECKING

from statecore._errors import LifecycleError
from statecore.generation._burst import burst, can_burst
from statecore.generation._clock import timed
from statecore.generation._draft import AnyDraft, Proposal
from statecore.generation._lifecycle import Status
from statecore.generation._pace import after_step
from statecore.generation._propose import check_draft, propose
from statecore.generation._round import plain_round
from statecore.generation._row import Finish, Row
from statecore.generation._run import Run
from statecore.generation._speculate import speculative_round
from statecore.generation._stops import OutputText
from statecore.generation._text import TextStream
from statecore.generation._windows import device_guess, windows

if TYPE_CHECKING:
    from statecore.generation._generation import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One token of a stream.

    row: its sequence.
    token: emitted.
    text: that is now certain, what was held back before it included; empty without a tokenizer.
    logprob: of the token; None unless log-probabilities were asked for.
    finish: why the sequence ended with this token; None if it goes on.
    """

    row: int
    token: int
    text: str
    logprob: float | None = None
    finish: Finish | None = None


def emit(gen: "Generation", num_tokens: int, draft: AnyDraft | None) -> list[list[int]]:
    """Emits up to `num_tokens` tokens of each live sequence; returns the new ones, a list a sequence."""
    check_num_tokens(num_tokens)
    gen._settle_life()
    _check_may_emit(gen)
    if draft is not None:
        check_draft(gen.runtime, draft, lossless=gen.lossless)
    starts = [len(row.output) for row in gen._run.rows]
    goals = [min(start + int(num_tokens), gen._run.max_tokens) for start in starts]
    life = gen._run.lifecycle.begin()
    gen._is_emitting = True
    try:
        try:
            gen._run.lifecycle = life
            while any(_limits(gen._run, goals)) and not _is_asked_to_stop(gen):
                _round(gen, goals, draft)
        finally:
            gen._run.lifecycle = gen._ended(life)
    finally:
        # An interrupt of the end above leaves a life that is running in no call: the next call ends it.
        gen._is_emitting = False
    if gen.warm is not None and not gen._run.live.any():
        gen.warm.keep(gen.runtime, gen._run)
    return [row.output[start:] for row, start in zip(gen._run.rows, starts, strict=True)]


def check_num_tokens(num_tokens: object) -> int:
    """Returns a whole number of at least 1; raises LifecycleError for anything else."""
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, Integral) or int(num_tokens) < 1:
        raise LifecycleError(f"{num_tokens!r} tokens were asked for; ask for a whole number of at least 1.")
    return int(num_tokens)


def _check_may_emit(gen: "Generation") -> None:
    run = gen._run
    if run.lifecycle.status is Status.COMPLETED:
        why = sorted({row.finish.value for row in run.rows if row.finish is not None})
        raise LifecycleError(
            f"The generation is complete: {run.num_emitted} tokens, ended by {', '.join(why)}. `restore` a snapshot or "
            "start another."
        )
    if gen.control.is_pause_requested:
        raise LifecycleError("The generation is paused: `resume` it, or `acknowledge` at its control.")


def _limits(run: Run, goals: list[int]) -> list[int]:
    """Returns how many tokens each sequence may still emit now; 0 for one that has ended."""
    pairs = zip(run.rows, goals, strict=True)
    return [0 if row.finish else max(0, goal - len(row.output)) for row, goal in pairs]


def _is_asked_to_stop(gen: "Generation") -> bool:
    return gen.control.is_pause_requested or gen.control.is_cancel_requested


def _round(gen: "Generation", goals: list[int], draft: AnyDraft | None) -> None:
    """Emits at least one token of each sequence that may, in one call of the runtime or a verify and its commit."""
    try:
        _emit_some(gen, _limits(gen._run, goals), draft)
    finally:
        gen._follow()
    _after(gen)


def _emit_some(gen: "Generation", limits: list[int], draft: AnyDraft | None) -> None:
    run, runtime, mode = gen._run, gen.runtime, "exact" if gen.lossless else None
    if gen.warm is None and draft is None and can_burst(run, limits):
        return burst(runtime, run, limits)
    if gen.warm is None and draft is not None and (guess := device_guess(run, draft, limits)) is not None:
        return windows(runtime, run, draft, guess, limits, mode)
    # A forced token is not guessed by anybody, and a window without guesses is a slow step.
    may_guess = run.pace.wait == 0 and run.forced.array() is None and run.unread is None
    with timed(run.clock, "draft"):
        proposal = propose(run, draft, limits, runtime.vocab_size) if draft is not None and may_guess else Proposal()
    is_plain = not any(proposal.tokens)
    if run.saves is not None:
        # Before anything is written: a round that fails after its verify has overwritten rows of the rings too.
        width = 1 if is_plain or draft is None else draft.num_draft + 1
        run.saves = run.saves.wrote(int(runtime.lengths.max()) + width)
    if draft is None or is_plain:
        plain_round(runtime, run, limits)
        run.pace = run.pace if draft is None else after_step(run.pace)
    else:
        speculative_round(runtime, run, draft, proposal, limits, mode)


def _after(gen: "Generation") -> None:
    """Saves what a later call may want: boundaries, cached prefixes; looks for loops."""
    run = gen._run
    if run.saves is not None:
        run.saves = run.saves.saved(gen.runtime, run.rows[0], run.sampling.mu)
    if gen.warm is not None:
        gen.warm.keep_due(gen.runtime, run)
    if run.guard is not None:
        _guard(gen)


def _guard(gen: "Generation") -> None:
    """Rolls a looping text back, or ends it where it cannot be."""
    guard = gen._run.guard
    assert guard is not None
    for row in gen._run.rows:
        period = None if row.finish else guard.period(row.output)
        if period is None:
            continue
        if gen._run.saves is None or gen._roll_back(period).decline is not None:
            row.finish = Finish.LOOP


def pieces(gen: "Generation", num_tokens: int | None, draft: AnyDraft | None) -> Iterator[Piece]:
    """Returns `num_tokens` tokens of each sequence as they come; see `Generation.stream`."""
    gen._settle_life()
    _check_may_emit(gen)
    gen._run.lifecycle.begin()  # refuses a run that is over
    num_tokens = gen._run.num_left if num_tokens is None else check_num_tokens(num_tokens)
    gen._run.is_streamed = True
    goals = [len(row.output) + num_tokens for row in gen._run.rows]
    return _pieces(gen, goals, draft, [_told(gen, row) for row in gen._run.rows], _place(gen))


def _pieces(
    gen: "Generation", goals: list[int], draft: AnyDraft | None, texts: list[OutputText], place: tuple
) -> Iterator[Piece]:
    while limits := [limit for limit in _limits(gen._run, goals) if limit]:
        if _place(gen) != place:
            raise LifecycleError(
                "The run was restored, exchanged or advanced by something else than this stream, so its text no longer "
                "goes on from what was told. Start another stream."
            )
        if _is_asked_to_stop(gen):
            gen._settle_life()
            break
        emitted = gen._emit(1 if draft is None else min(max(limits), draft.num_draft + 1), draft)
        place = _place(gen)
        if not any(emitted):
            break  # asked to stop in the call
        for number, tokens in enumerate(emitted):
            row = gen._run.rows[number]
            for index, token in enumerate(tokens, len(row.output) - len(tokens)):
                finish = row.finish if index + 1 == len(row.output) else None
                texts[number], text = _tell(texts[number], token, finish)
                logprob = row.logprobs[index] if row.logprobs else None
                yield Piece(row=number, token=token, text=text, logprob=logprob, finish=finish)
    if gen.warm is not None:
        gen.warm.keep(gen.runtime, gen._run)


def _place(gen: "Generation") -> tuple:
    """Returns what tells that a run is where it was left."""
    run = gen._run
    return run.run_id, run.lifecycle.epoch, run.num_rollbacks, [len(row.output) for row in run.rows]


def _told(gen: "Generation", row: Row) -> OutputText:
    """Returns what a stream would have told of the tokens emitted so far."""
    tokenizer = gen.runtime.model.tokenizer
    text = OutputText(stream=None if tokenizer is None else TextStream(tokenizer=tokenizer), stops=gen._run.stops)
    for token in row.output:
        text, _ = text.push(token)
    return text


def _tell(text: OutputText, token: int, finish: Finish | None) -> tuple[OutputText, str]:
    """Returns the text after `token` and what is certain now; all of it where the sequence has ended."""
    text, certain = text.push(token)
    if finish is None:
        return text, certain
    text, rest = text.flush()
    return text, certain + rest

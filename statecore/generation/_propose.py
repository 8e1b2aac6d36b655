"""Guesses for a round: from a draft without a state a sequence at a time, from another for all at once."""

import itertools
from numbers import Integral
from typing import Any

import numpy as np

from statecore._errors import RollbackError, UnsupportedError
from statecore.backend import checks
from statecore.generation._draft import AnyDraft, Drawing, Proposal, is_stateful
from statecore.generation._pace import most_drafts
from statecore.generation._row import Row
from statecore.generation._run import Run
from statecore.generation._sampler import cut_settings
from statecore.runtime import Runtime


def check_draft(runtime: Runtime, draft: AnyDraft, *, lossless: bool = False) -> None:
    """Raises UnsupportedError, RollbackError or what the draft itself raises, for one this runtime cannot follow."""
    if not is_stateful(draft) and not (hasattr(draft, "propose") and hasattr(draft, "num_draft")):
        raise UnsupportedError(f"A draft has `num_draft` and `propose`, but this is a {type(draft).__name__}.")
    is_whole = isinstance(draft.num_draft, Integral) and not isinstance(draft.num_draft, bool)
    if not is_whole or draft.num_draft < 1:
        raise UnsupportedError(
            f"num_draft is {draft.num_draft!r}, but a draft guesses a whole number of tokens, at least one."
        )
    if runtime.max_window is not None and draft.num_draft + 1 > runtime.max_window:
        raise RollbackError(
            f"num_draft is {draft.num_draft}, which makes windows of {draft.num_draft + 1} rows, but the rings of "
            f"{runtime.model.name} can undo {runtime.max_window}. Draft fewer tokens."
        )
    layout = runtime.geometry.layout
    if opaque := layout.indices("opaque"):
        raise RollbackError(
            f"Nothing undoes the opaque plane `{layout.paths[opaque[0]]}` of {runtime.model.name}, so a guess cannot "
            "be taken back from it. Declare how the plane is undone, or run without a draft."
        )
    if is_stateful(draft):
        draft.check(runtime)
        if lossless and not draft.is_lossless:
            raise UnsupportedError(
                f"The generation is `lossless`, but {type(draft).__name__} accepts by a rule that is not: its output "
                "is distributed otherwise than the model's own draws. Choose another acceptance."
            )


def propose(run: Run, draft: AnyDraft, limits: list[int], vocab_size: int) -> Proposal:
    """Returns each sequence's guesses, at most one fewer than it may still emit, up to one that is no token.

    The state of a draft that has one is taken out of the run: `settle` puts it back.
    """
    most = [max(0, min(int(most_drafts(run.pace, draft.num_draft)), limit - 1)) for limit in limits]
    if not any(most):
        return Proposal(tokens=[[] for _ in most])
    if not is_stateful(draft):
        pairs = zip(run.rows, most, strict=True)
        return Proposal(tokens=[_guess(draft, row, count, vocab_size) if count else [] for row, count in pairs])
    state, proposal = draft.propose_rows(run.drafted.pop(draft, None), _drawing(run, most, vocab_size))
    run.proposed = state
    if not any(proposal.tokens):
        settle(run, draft, np.zeros(len(most), np.int32))
    return proposal


def settle(run: Run, draft: AnyDraft, num_rows: np.ndarray) -> None:
    """Tells a draft that has a state how many tokens each sequence has emitted, `[B]`."""
    if is_stateful(draft):
        state, run.proposed = run.proposed, None
        run.drafted[draft] = draft.settle(state, num_rows)


def _drawing(run: Run, limits: list[int], vocab_size: int) -> Drawing:
    is_greedy = run.sampler.is_greedy
    return Drawing(
        histories=[[*row.prompt, *row.output] for row in run.rows],
        limits=np.array(limits, np.int32),
        capacity=max(len(row.prompt) for row in run.rows) + run.max_tokens,
        cuts=None if is_greedy else cut_settings(run.sampler, vocab_size),
        key=None if is_greedy else run.sampling.key,
        emitted=np.array([len(row.output) for row in run.rows], np.int32),
    )


def _guess(draft: Any, row: Row, most: int, vocab_size: int) -> list[int]:
    guess = checks.host_ints(draft.propose([*row.prompt, *row.output], most), "a draft's tokens").tolist()[:most]
    return list(itertools.takewhile(lambda token: 0 <= token < vocab_size, guess))

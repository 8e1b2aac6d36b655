"""One speculative round: draft, verify, accept, commit."""

import numpy as np

from statecore._errors import RollbackError, UnsupportedError
from statecore.backend import checks
from statecore.generation._draft import Draft
from statecore.generation._run import Run, Speculation
from statecore.generation._sampler import choose
from statecore.runtime import Runtime


def check_draft(runtime: Runtime, draft: Draft) -> None:
    """Raises UnsupportedError or RollbackError for a draft this runtime cannot follow."""
    if draft.num_draft < 1:
        raise UnsupportedError(f"num_draft is {draft.num_draft}, but a draft guesses at least one token.")
    if runtime.max_window is not None and draft.num_draft + 1 > runtime.max_window:
        raise RollbackError(
            f"num_draft is {draft.num_draft}, which makes windows of {draft.num_draft + 1} rows, but the rings of "
            f"{runtime.model.name} can undo {runtime.max_window}. Draft fewer tokens."
        )


def speculative_round(
    runtime: Runtime, run: Run, drafts: list[list[int]], limits: list[int], width: int, mode: str | None
) -> None:
    """Emits at least one token for each sequence whose limit is above 0, in one verify.

    A draft token is accepted if it is the token that plain decoding would choose there,
    from the same logits and the same draw: for a draft that is certain of its guess that
    is speculative sampling (arXiv 2302.01318), and the output is plain decoding's.

    Args:
      runtime: whose state is advanced.
      run: whose outputs are extended.
      drafts: the guesses for each sequence, from `propose`.
      limits: for each sequence, how many tokens it may still emit now.
      width: rows of the window, always the same, so that it is compiled once.
      mode: of the verify.
    """
    counts = np.array([min(len(row) + 1, limit) for row, limit in zip(drafts, limits, strict=True)], np.int32)
    window = np.zeros((len(drafts), width), np.int32)
    window[:, 0] = run.pending()
    for row, guess in enumerate(drafts):
        window[row, 1 : 1 + len(guess)] = guess
    logits = runtime.verify(window, num_valid=counts, mode=mode)
    num_rows = np.zeros_like(counts)
    try:
        emitted = np.array([len(row) for row in run.outputs])[:, None] + np.arange(window.shape[1])
        chosen = np.array(choose(run.sampler, run.key, emitted, logits))
        num_rows = _rows_kept(window, chosen, counts)
    finally:
        # Whatever happened, the window is closed: with nothing kept, as it was before.
        runtime.commit(num_rows)
    for row, kept in enumerate(num_rows):
        run.outputs[row] += chosen[row, :kept].tolist()
    run.speculation = _counted(run.speculation, counts, num_rows)


def propose(run: Run, draft: Draft, limits: list[int]) -> list[list[int]]:
    """Returns each sequence's guesses, at most one fewer than it may still emit."""
    proposals = []
    for prompt, output, limit in zip(run.prompts, run.outputs, limits, strict=True):
        most = min(draft.num_draft, limit - 1)
        proposals.append(_guess(draft, [*prompt, *output], most) if most > 0 else [])
    return proposals


def _guess(draft: Draft, history: list[int], most: int) -> list[int]:
    return checks.host_ints(draft.propose(history, most), "a draft's tokens").tolist()[:most]


def _rows_kept(window: np.ndarray, chosen: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns rows to commit, `[B]`: the anchor and each draft that was chosen, up to a miss."""
    # Row i + 1 was guessed; row i's logits say what stands there.
    right = window[:, 1:] == chosen[:, :-1]
    right &= np.arange(1, window.shape[1]) < counts[:, None]
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    return np.where(counts > 0, accepted + 1, 0).astype(np.int32)


def _counted(speculation: Speculation, counts: np.ndarray, num_rows: np.ndarray) -> Speculation:
    live = int((counts > 0).sum())
    return Speculation(
        num_verifies=speculation.num_verifies + live,
        num_tokens=speculation.num_tokens + int(num_rows.sum()),
        num_drafted=speculation.num_drafted + int(counts.sum()) - live,
        num_accepted=speculation.num_accepted + int(num_rows.sum()) - live,
    )

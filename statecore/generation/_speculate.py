"""One speculative round: draft, verify, accept, commit."""

import jax
import numpy as np

from statecore.backend import check_mode
from statecore.generation._clock import timed
from statecore.generation._constraint import window_masks
from statecore.generation._draft import AnyDraft, Proposal, Rule, is_stateful
from statecore.generation._draw_checks import check_choices
from statecore.generation._pace import after_window, widths_of
from statecore.generation._propose import settle
from statecore.generation._round import draw_rows, look_ahead, take
from statecore.generation._ruled import draw_ruled
from statecore.generation._run import Run
from statecore.generation._sampling import Draws, drawn_tokens
from statecore.runtime import Runtime


def speculative_round(
    runtime: Runtime, run: Run, draft: AnyDraft, proposal: Proposal, limits: list[int], mode: str | None
) -> None:
    """Emits at least one token for each sequence whose limit is above 0, in one verify.

    A draft token is accepted if it is the token that plain decoding would choose there,
    from the same logits and the same draw: for a draft that is certain of its guess that
    is speculative sampling (arXiv 2302.01318), and the output is plain decoding's. Guesses
    that were drawn are accepted by the draft's rule in a sampled run. A sequence that ends
    inside its window ends where plain decoding would.

    Args:
      runtime: whose state is advanced.
      run: whose outputs are extended.
      draft: who guessed.
      proposal: its guesses, from `propose`.
      limits: for each sequence, how many tokens it may still emit now.
      mode: of the verify.
    """
    # Of one or two widths, so that few are compiled.
    needed = 1 + max(len(row) for row in proposal.tokens)
    width = next(width for width in widths_of(draft.num_draft) if width >= needed)
    window, counts = _window(run, proposal.tokens, limits, width)
    # Past a draft that its constraint forbids or that completes it, no row can matter.
    allowed, live = window_masks(run.constraints, window, counts, runtime.vocab_size)
    check_choices(runtime.vocab_size, allowed, None, live)
    with timed(run.clock, "verify") as made:
        made.append(logits := runtime.verify(window, num_valid=counts, mode=mode))
    num_rows = np.zeros_like(counts)
    try:
        draws, accepted = _accepted(run, draft, proposal, logits, window, counts, allowed, live)
        chosen = np.array(draws.tokens)
        drawn_tokens(draws, np.arange(window.shape[1]) < accepted[:, None])  # refuses a choice from NaN
        taken = look_ahead(run, chosen, accepted)
        num_rows = np.array([one.num_tokens for one in taken], np.int32)
    finally:
        # Whatever happened, the window is closed: with nothing kept, as it was before.
        with timed(run.clock, "commit") as made:
            runtime.commit(num_rows)
            made.append(runtime.state)
    take(run, chosen, taken, draws)
    settle(run, draft, num_rows)
    if run.clock is not None:
        run.clock.rounds.append((int(np.maximum(counts - 1, 0).sum()), int(num_rows.sum()), int((num_rows > 0).sum())))
    got = np.float32(num_rows.sum() / max(1, int((counts > 0).sum())))
    run.pace = after_window(run.pace, got, np.float32(getattr(draft, "worth", 0.0)))
    run.speculation = run.speculation.counted(counts - 1, num_rows, check_mode(runtime.model.backend, mode))


def _window(run: Run, guesses: list[list[int]], limits: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the window `[B, width]`, and how many rows of each sequence count, `[B]`."""
    counts = np.array([min(len(row) + 1, limit) for row, limit in zip(guesses, limits, strict=True)], np.int32)
    window = np.zeros((len(guesses), width), np.int32)
    window[:, 0] = run.pending()
    for row, guess in enumerate(guesses):
        window[row, 1 : 1 + len(guess)] = guess
    return window, counts


def _accepted(
    run: Run,
    draft: AnyDraft,
    proposal: Proposal,
    logits: jax.Array,
    window: np.ndarray,
    counts: np.ndarray,
    allowed: np.ndarray | None,
    live: np.ndarray,
) -> tuple[Draws, np.ndarray]:
    """Returns what the window's rows draw, and how many rows of each sequence may be kept, `[B]`."""
    rule = rule_of(run, draft) if proposal.probs is not None else None
    if rule is None:
        draws = draw_rows(run, logits, window, allowed, live)
        return draws, _rows_kept(window, np.array(draws.tokens), live.sum(axis=1))
    # A draft that the constraint forbids is rejected as any other: what is drawn instead must know of it.
    num_valid = np.minimum(counts, live.sum(axis=1, dtype=np.int32) + 1)
    emitted = np.array([len(row.output) for row in run.rows], np.int32)
    draws, num_accepted = draw_ruled(
        rule,
        run.sampler,
        run.sampling,
        emitted[:, None] + np.arange(window.shape[1], dtype=np.int32),
        logits,
        window=window,
        num_valid=num_valid,
        probs=None if proposal.probs is None else proposal.probs[:, : window.shape[1] - 1],
        allowed=allowed,
        live=live,
        num_logprobs=run.num_logprobs,
    )
    return draws, np.where(counts > 0, np.array(num_accepted) + 1, 0).astype(np.int32)


def rule_of(run: Run, draft: AnyDraft) -> Rule | None:
    """Returns the rule by which guesses are accepted; None for those that plain decoding would choose.

    Mirostat's cut follows from what was drawn before, so that a rule has no distribution to go by.
    """
    is_ruled = not run.sampler.is_greedy and run.sampler.mirostat is None
    return draft.rule if is_ruled and is_stateful(draft) else None


def _rows_kept(window: np.ndarray, chosen: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns rows to commit, `[B]`: the anchor and each draft that was chosen, up to a miss."""
    # Row i + 1 was guessed; row i's logits say what stands there.
    right = window[:, 1:] == chosen[:, :-1]
    right &= np.arange(1, window.shape[1]) < counts[:, None]
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    return np.where(counts > 0, accepted + 1, 0).astype(np.int32)

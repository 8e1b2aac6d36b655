"""Several windows in one call: the loop of speculative decoding on the device.

As in `_burst`, what must be looked at token by token goes by rounds of the host.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from statecore._errors import NonFiniteError
from statecore.backend import check_mode, launch
from statecore.generation._burst import is_unwatched
from statecore.generation._draft import AnyDraft, Guess, is_stateful
from statecore.generation._pace import Pace, after_step, after_window, most_drafts, widths_of
from statecore.generation._run import Run
from statecore.generation._sampler_state import SamplerState, advance
from statecore.generation._sampling import draw_traced, settings_of
from statecore.runtime import Runtime

# Tokens of one call, a few more where the last window is accepted: see `BURST`.
SPAN = 32
# Histories are padded to this or twice, four times as much, so that few lengths compile.
_LEAST_EXTENT = 256


@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Looping:
    """What the loop carries from window to window.

    settings, sampling: as of `Picking`.
    history: `[B, H]` int32, prompt and output.
    length: `[B]` int32, tokens of the history.
    emitted: `[B]` int32, tokens emitted so far.
    left: `[B]` int32, tokens that each sequence may still emit; 0 once it has ended.
    fed: `[B]` int32, tokens that entered the state in this call.
    stops: `[S]` int32, tokens that end a sequence; None for none.
    is_bad: whether the logits offered no choice.
    pace: whether drafts pay; `worth` is what they must bring.
    num_verifies: windows verified, one a sequence that had rows in it; num_tokens: what they emitted.
    drafted_at, accepted_at: `[K - 1]`, as of `Speculation`.
    """

    settings: tuple
    sampling: SamplerState
    history: Any
    length: Any
    emitted: Any
    left: Any
    fed: Any
    stops: Any
    is_bad: Any
    pace: Pace
    worth: Any
    num_verifies: Any
    num_tokens: Any
    drafted_at: Any
    accepted_at: Any


class _Told(NamedTuple):
    """What of `Looping` the host must know."""

    history: Any
    length: Any
    is_bad: Any
    pace: Pace
    num_verifies: Any
    num_tokens: Any
    drafted_at: Any
    accepted_at: Any


@functools.lru_cache(maxsize=64)
def _loop(guess: Guess, num_draft: int) -> launch.Loop:
    """Returns what the loop does between transitions; one object for each way to guess."""

    def goes_on(carry: Looping):
        return jnp.any(carry.left > 0) & ~carry.is_bad & (jnp.max(carry.fed) < SPAN)

    def guessed(carry: Looping):
        limits = jnp.where(carry.pace.wait > 0, 0, jnp.clip(carry.left - 1, 0, most_drafts(carry.pace, num_draft)))
        tokens, found = guess(carry.history, carry.length, num_draft)
        counts = jnp.where(carry.left > 0, 1 + jnp.minimum(found, limits), 0)
        pending = jnp.take_along_axis(carry.history, carry.length[:, None] - 1, axis=1)
        return carry, jnp.concatenate([pending, tokens], axis=1), counts.astype(jnp.int32)

    def accept(carry: Looping, logits, window, counts):
        places = jnp.arange(window.shape[1])
        draws = draw_traced(
            carry.settings, carry.sampling, carry.emitted[:, None] + places, logits, None,
            window if carry.sampling.counts is not None and window.shape[1] > 1 else None,
        )  # fmt: skip
        num_rows, has_ended = _num_rows(carry, draws.tokens, window, counts)
        is_bad = jnp.any((draws.tokens < 0) & (places < num_rows[:, None]))
        num_rows = jnp.where(is_bad, 0, num_rows)
        after = _counted(carry, counts, num_rows) if window.shape[1] > 1 else _stepped(carry)
        # A step cannot be taken back: its token is in the state even where none followed from it.
        fed = num_rows if window.shape[1] > 1 else (counts > 0).astype(jnp.int32)
        at = jnp.where(places < num_rows[:, None], carry.length[:, None] + places, carry.history.shape[1])
        rows = jnp.arange(window.shape[0])[:, None]
        after = dataclasses.replace(
            after,
            sampling=advance(carry.sampling, draws.tokens, num_rows, draws.mus),
            history=carry.history.at[rows, at].set(draws.tokens, mode="drop"),
            length=carry.length + num_rows,
            emitted=carry.emitted + num_rows,
            left=jnp.where(has_ended & ~is_bad, 0, carry.left - num_rows),
            fed=carry.fed + fed,
            is_bad=is_bad,
        )
        return after, num_rows

    return launch.Loop(widths_of(num_draft), goes_on, guessed, accept)


def _num_rows(carry: Looping, drawn, window, counts):
    """Returns how many tokens each sequence emits, `[B]`, and which have ended by a stop token."""
    places = jnp.arange(window.shape[1])
    right = (window[:, 1:] == drawn[:, :-1]) & (places[1:] < counts[:, None])
    accepted = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    num_rows = jnp.where(counts > 0, accepted + 1, 0)
    if carry.stops is None:
        return num_rows, jnp.zeros_like(counts, bool)
    is_stop = (drawn[..., None] == carry.stops).any(axis=-1) & (places < num_rows[:, None])
    has_ended = is_stop.any(axis=1)
    return jnp.where(has_ended, jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, num_rows), has_ended


def _counted(carry: Looping, counts, num_rows) -> Looping:
    live, width = counts > 0, carry.drafted_at.shape[0]
    got = num_rows.sum() / jnp.maximum(live.sum(), 1)

    def reached(numbers):
        return (jnp.arange(width) < jnp.where(live, numbers - 1, 0)[:, None]).sum(axis=0, dtype=jnp.int32)

    return dataclasses.replace(
        carry,
        pace=after_window(carry.pace, got.astype(jnp.float32), carry.worth),
        num_verifies=carry.num_verifies + live.sum(dtype=jnp.int32),
        num_tokens=carry.num_tokens + num_rows.sum(dtype=jnp.int32),
        drafted_at=carry.drafted_at + reached(counts),
        accepted_at=carry.accepted_at + reached(num_rows),
    )


def _stepped(carry: Looping) -> Looping:
    return dataclasses.replace(carry, pace=after_step(carry.pace))


def device_guess(run: Run, draft: AnyDraft | None, limits: list[int]) -> Guess | None:
    """Returns how a draft guesses on the device; None where it does not, or the host must look at each window."""
    if draft is None or is_stateful(draft) or max(limits) <= draft.num_draft:
        return None
    is_watched = run.clock is not None or run.num_logprobs is not None or not is_unwatched(run)
    return None if is_watched else getattr(draft, "device_guess", None)


def windows(runtime: Runtime, run: Run, draft: AnyDraft, guess: Guess, limits: list[int], mode: str | None) -> None:
    """Emits about `SPAN` tokens of each sequence, no more than its limit, in one call.

    Raises:
      NonFiniteError: the logits hold NaN or an infinity; what was emitted before is kept.
    """
    most = np.minimum(limits, SPAN + draft.num_draft)
    carry = _looping(runtime, run, draft, most)
    after = runtime.speculate(carry, _loop(guess, draft.num_draft), most=most, mode=mode)
    told = jax.tree.map(np.array, _Told(*[getattr(after, name) for name in _Told._fields]))
    _take(run, told)
    run.sampling = dataclasses.replace(after.sampling, key=run.sampling.key)
    run.pace = told.pace
    run.speculation = run.speculation.merged(
        int(told.num_verifies), int(told.num_tokens), told.drafted_at, told.accepted_at,
        check_mode(runtime.model.backend, mode),
    )  # fmt: skip
    if told.is_bad:
        raise NonFiniteError(
            "The logits of a window hold NaN or an infinity, or nothing finite, so no token can be chosen. Did the "
            "model overflow?"
        )


def _looping(runtime: Runtime, run: Run, draft: AnyDraft, most: np.ndarray) -> Looping:
    lengths = np.array([len(row.prompt) + len(row.output) for row in run.rows], np.int32)
    extent = max(len(row.prompt) for row in run.rows) + run.max_tokens
    history = np.zeros((len(lengths), max(_LEAST_EXTENT, 1 << (extent - 1).bit_length())), np.int32)
    for number, row in enumerate(run.rows):
        history[number, : lengths[number]] = [*row.prompt, *row.output]
    none, places = np.int32(0), np.zeros(draft.num_draft, np.int32)
    return Looping(
        settings=settings_of(run.sampler, runtime.vocab_size),
        sampling=dataclasses.replace(run.sampling, key=None) if run.sampler.is_greedy else run.sampling,
        history=history,
        length=lengths,
        emitted=np.array([len(row.output) for row in run.rows], np.int32),
        left=most.astype(np.int32),
        fed=np.zeros(len(lengths), np.int32),
        stops=np.array(sorted(run.stops.tokens), np.int32) if run.stops.tokens else None,
        is_bad=np.False_,
        pace=run.pace,
        worth=np.float32(getattr(draft, "worth", 0.0)),
        num_verifies=none,
        num_tokens=none,
        drafted_at=places,
        accepted_at=places,
    )


def _take(run: Run, told: _Told) -> None:
    """Appends to each sequence what the loop has emitted."""
    for row, history, length in zip(run.rows, told.history, told.length.tolist(), strict=True):
        tokens = history[len(row.prompt) + len(row.output) : length].tolist()
        if tokens:
            row.take(tokens, row.look_ahead(tokens, run.max_tokens))

"""Beam search: the state of every beam is a row, and choosing beams reorders rows."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, NonFiniteError
from statecore._typing import PyTree
from statecore.backend import Model, checks, extend, step, take_rows
from statecore.generation._prompt import Prompt, prompt_rows
from statecore.generation._sampler import is_finite
from statecore.generation._stops import stop_tokens as checked_stops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beam:
    """One text found by `beam_search`.

    tokens: emitted after the prompt, a stop token included.
    logprob: sum of their log-probabilities, by the model.
    score: what beams are ordered by: `logprob / len(tokens) ** length_penalty`.
    is_finished: whether it ended at a stop token.
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float
    is_finished: bool


def beam_search(
    model: Model,
    prompt: Prompt,
    *,
    num_beams: int,
    num_tokens: int,
    stop_tokens: Collection[int] = (),
    length_penalty: float = 0.0,
) -> list[Beam]:
    """Returns the likeliest texts that beam search finds, the best first.

    The beams are the sequences of one state: each step reads a token of every beam, keeps
    the `num_beams` likeliest continuations, and reorders the state by the beams they
    continue. With `num_beams` of `V ** (num_tokens - 1)` nothing is cut, so the search is
    exhaustive.

    Args:
      model: from `statecore.load`.
      prompt: text or token ids, of one sequence.
      num_beams: beams kept.
      num_tokens: the most tokens emitted.
      stop_tokens: end a beam, which then competes by its score.
      length_penalty: exponent of the length in the score; 0 compares sums, 1 means.

    Raises:
      GeometryError: a count below 1, no or several prompts, or a token outside the vocabulary.
      NonFiniteError: logits hold NaN or an infinity.
    """
    width, length = checks.whole(num_beams, "num_beams", least=1), checks.whole(num_tokens, "num_tokens", least=1)
    (tokens,) = prompt_rows(prompt, 1, model.tokenizer)
    if not is_finite(length_penalty):
        raise GeometryError(f"length_penalty is {length_penalty!r}, but must be a finite number.")
    state = _read(model, tokens, width, length)
    stops = checked_stops(stop_tokens, model.backend.vocab_size(model.params, state))
    live = [Beam(tokens=(), logprob=0.0, score=0.0, is_finished=False)]
    finished: list[Beam] = []
    pending = np.full(width, tokens[-1], np.int32)
    for _ in range(length):
        state, logits = step(model.backend, model.params, state, pending, donate=True)
        logprobs = np.array(_log_softmax(logits))
        live, parents = _continued(live, logprobs[: len(live)], width, length_penalty, stops, finished)
        if not live or _is_decided(live, finished, width, length, length_penalty):
            break
        rows = parents + [parents[0]] * (width - len(parents))  # rows beyond the beams are not read
        state = take_rows(model.backend, state, rows)
        pending = np.array([beam.tokens[-1] for beam in live] + [0] * (width - len(live)), np.int32)
    return sorted([*finished, *live], key=lambda beam: -beam.score)[:width]


def _read(model: Model, tokens: list[int], width: int, length: int) -> PyTree:
    """Returns the state of `width` sequences that all hold the prompt less its last token."""
    capacity = len(tokens) + length
    state = model.backend.init(model.params, batch=1, capacity=capacity)
    checks.check_vocab(np.array(tokens), None, model.backend.vocab_size(model.params, state))
    if len(tokens) > 1:
        state, _ = extend(model.backend, model.params, state, [tokens[:-1]], logits="none", donate=True)
    return take_rows(model.backend, state, [0] * width)


@jax.jit
def _log_softmax(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def _continued(
    live: list[Beam],
    logprobs: np.ndarray,
    width: int,
    length_penalty: float,
    stops: frozenset[int],
    finished: list[Beam],
) -> tuple[list[Beam], list[int]]:
    """Returns the beams that go on and the rows they continue; moves ended ones to `finished`."""
    totals = np.array([beam.logprob for beam in live])[:, None] + logprobs.astype(np.float64)
    # Ties go to the earlier beam and the smaller token, so that a search repeats itself.
    order = np.argsort(-totals, axis=None, kind="stable")
    if np.isnan(totals).any():
        raise NonFiniteError("The logits of a beam hold NaN or an infinity, so that no order of beams can be right.")
    beams, parents = [], []
    for place in order[: width + len(stops) * len(live)]:
        if totals.flat[place] == -np.inf:
            break
        row, token = divmod(int(place), logprobs.shape[1])
        text = (*live[row].tokens, token)
        total = float(totals[row, token])
        is_end = token in stops
        beam = Beam(tokens=text, logprob=total, score=total / len(text) ** length_penalty, is_finished=is_end)
        if is_end:
            finished.append(beam)
        else:
            beams.append(beam)
            parents.append(row)
        if len(beams) == width:
            break
    return beams, parents


def _is_decided(live: list[Beam], finished: list[Beam], width: int, length: int, length_penalty: float) -> bool:
    """Returns whether no live beam can still enter the best `width`."""
    if len(finished) < width:
        return False
    worst = sorted((beam.score for beam in finished), reverse=True)[width - 1]
    # A sum only falls; its score is greatest where the length divides most.
    best = max(beam.logprob for beam in live) / length ** max(length_penalty, 0.0)
    return best < worst

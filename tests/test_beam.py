"""Beam search against enumeration."""

import itertools

import numpy as np
import pytest
from helpers import cases

import statecore as sc

PROMPT = [3, 1, 4]


def logprob(case, text):
    """Returns the log-probability of `text` after the prompt, read in one chunk."""
    state = case.backend.init(case.params, batch=1, capacity=32)
    _, logits = sc.extend(case.backend, case.params, state, [PROMPT + list(text)])
    logits = np.array(logits[0], np.float64)[len(PROMPT) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(logprobs[place, token] for place, token in enumerate(text))


def model(case):
    return sc.load((case.backend, case.params))


@pytest.mark.parametrize("stop_tokens", [(), (5, 9)])
def test_a_search_that_cuts_nothing_is_exhaustive(stop_tokens):
    """Every text of three tokens, of which the best are found, by the same sums."""
    case = cases()["decay"]
    size, length = case.vocab_size, 3
    texts = set()
    for text in itertools.product(range(size), repeat=length):
        ends = [place for place, token in enumerate(text) if token in stop_tokens]
        texts.add(text[: ends[0] + 1] if ends else text)
    wanted = sorted(((logprob_of(case, text), text) for text in texts), reverse=True)[:5]
    found = sc.beam_search(
        model(case), PROMPT, num_beams=size ** (length - 1), num_tokens=length, stop_tokens=stop_tokens
    )
    for (total, text), beam in zip(wanted, found, strict=False):
        assert beam.tokens == text and beam.is_finished == (text[-1] in stop_tokens)
        assert beam.logprob == pytest.approx(total, abs=1e-4)


def logprob_of(case, text, known={}):  # noqa: B006
    """Sums of shared prefixes are read once."""
    if text not in known:
        known[text] = logprob(case, text) if len(text) == 1 else logprob_of(case, text[:-1]) + last(case, text)
    return known[text]


def last(case, text, known={}):  # noqa: B006
    if text[:-1] not in known:
        state = case.backend.init(case.params, batch=1, capacity=32)
        _, logits = sc.extend(case.backend, case.params, state, [PROMPT + list(text[:-1])], logits="last")
        logits = np.array(logits[0], np.float64)
        known[text[:-1]] = logits - np.log(np.exp(logits).sum())
    return known[text[:-1]][text[-1]]


def test_one_beam_is_greedy_and_beams_are_sorted():
    case = cases()["decay"]
    runtime = sc.Runtime(model(case), capacity=32)
    greedy = sc.Generation(runtime, PROMPT, max_tokens=6).run(6)
    (beam,) = sc.beam_search(model(case), PROMPT, num_beams=1, num_tokens=6)
    assert list(beam.tokens) == greedy
    beams = sc.beam_search(model(case), PROMPT, num_beams=4, num_tokens=6, length_penalty=1.0)
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
    assert all(beam.score == pytest.approx(logprob(case, beam.tokens) / 6, abs=1e-4) for beam in beams)
    assert len({beam.tokens for beam in beams}) == 4


@pytest.mark.parametrize("wrong", [{"num_beams": 0}, {"num_tokens": 0}, {"num_beams": 2.0}, {"stop_tokens": ["a"]}])
def test_wrong_sizes(wrong):
    with pytest.raises(sc.GeometryError):
        sc.beam_search(model(cases()["decay"]), PROMPT, **{"num_beams": 2, "num_tokens": 2} | wrong)

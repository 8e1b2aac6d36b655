"""Where texts end: stop tokens and strings, lengths, requests; rows that end at different times; streams."""

import itertools

import numpy as np
import pytest
from generations import PROMPTS, WARM, Letters, alone, start
from helpers import assert_bits, cases, host
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore.generation import Finish, Status

SAMPLERS = {"greedy": sc.Sampler(), "sampled": WARM}
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


class Known:
    """A draft that knows what comes, and is right or wrong by a pattern."""

    def __init__(self, texts, rights, num_draft=4):
        self.texts, self.num_draft = texts, num_draft
        self.rights = itertools.cycle(rights)

    def propose(self, history, limit):
        (known,) = [text for text in self.texts if text[: len(history)] == list(history)]
        guesses = known[len(history) : len(history) + limit]
        return [token if next(self.rights) else (token + 1) % 10 for token in guesses]


def known(outputs, rights):
    return Known([prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)], rights)


@by_sampler
def test_rows_end_at_different_times_and_each_is_as_alone(sampler):
    """A batch whose rows stop at different tokens: the states are those of each row decoded by itself."""
    free = start(sampler=sampler, seed=4, max_tokens=20).run(20)
    stop = free[1][3]  # stops one row early, the other later or never
    gen = start(sampler=sampler, seed=4, max_tokens=20, stop_tokens=[stop])
    texts = gen.run(20)
    for row, text in enumerate(free):
        wanted = text[: text.index(stop) + 1] if stop in text else text
        assert texts[row] == wanted
        assert gen.finish[row] is (Finish.STOP_TOKEN if stop in text else Finish.LENGTH)
    assert gen.status is Status.COMPLETED and gen.num_left == 0
    assert gen.runtime.lengths.tolist() == [len(p) + len(t) - 1 for p, t in zip(PROMPTS, texts, strict=True)]
    backend, params = cases()["decay"].backend, cases()["decay"].params
    for row, text in enumerate(texts):
        read = len(PROMPTS[row]) - 1
        state = backend.init(params, batch=1, capacity=96)
        state, _ = sc.extend(backend, params, state, [PROMPTS[row][:-1]])
        for token in (PROMPTS[row] + text)[read:-1]:
            state, _ = sc.step(backend, params, state, [token])
        assert sc.equal(backend, sc.take_rows(backend, gen.runtime.state, [row]), state)


@pytest.mark.parametrize("name", ["digit", "decay"])
@by_sampler
@given(rights=st.lists(st.booleans(), min_size=1, max_size=7), place=st.integers(0, 11))
def test_a_stop_inside_an_accepted_prefix_ends_where_plain_decoding_does(name, sampler, rights, place):
    """NF1, S51, SB19: tokens, state, length and reason, wherever in a window the stop falls."""
    free = start(name, sampler=sampler, seed=2, max_tokens=14).run(14)
    stop = free[0][place]
    plain = start(name, sampler=sampler, seed=2, max_tokens=14, stop_tokens=[stop])
    gen = start(name, sampler=sampler, seed=2, max_tokens=14, stop_tokens=[stop])
    plain.run(14)
    gen.run(14, speculate=known(free, rights))
    assert gen.tokens == plain.tokens and gen.finish == plain.finish
    assert gen.runtime.lengths.tolist() == plain.runtime.lengths.tolist()
    assert sc.equal(cases()[name].backend, gen.runtime.state, plain.runtime.state)


@by_sampler
def test_stop_strings_end_the_text_before_them(sampler):
    """The text is plain decoding's, cut before the first match; the tokens hold the match."""
    free = alone(0, sampler=sampler, seed=1, max_tokens=24)
    free.run(24)
    text = free.text
    stop = text[5:8]
    wanted = text[: text.index(stop)]
    for speculate in (None, sc.NGramDraft(num_draft=4)):
        gen = alone(0, sampler=sampler, seed=1, max_tokens=24, stop_strings=["..", stop])
        gen.run(24, speculate=speculate)
        assert gen.text == wanted and gen.finish is Finish.STOP_STRING
        assert Letters().decode(gen.tokens) == wanted + stop


def test_a_stop_token_is_a_token_and_no_text():
    free = alone(0, max_tokens=9).run(9)
    gen = alone(0, max_tokens=9, stop_tokens=[free[4]])
    got = gen.run(9)
    assert got == free[: free.index(free[4]) + 1] and gen.text == Letters().decode(got[:-1])


@by_sampler
@given(cut=st.integers(1, 8))
def test_a_stop_string_across_a_saved_boundary(sampler, cut):
    """NC1: what the stop has seen is part of a snapshot."""
    free = alone(0, sampler=sampler, seed=1, max_tokens=12)
    free.run(12)
    stop = free.text[6:10]
    plain = alone(0, sampler=sampler, seed=1, max_tokens=12, stop_strings=[stop])
    plain.run(12)
    gen = alone(0, sampler=sampler, seed=1, max_tokens=12, stop_strings=[stop])
    gen.run(cut)
    if gen.status is Status.COMPLETED:
        return
    snap = gen.snapshot()
    gen.run(12)
    assert gen.text == plain.text
    gen.restore(snap)
    gen.run(12)
    assert gen.text == plain.text and gen.finish == plain.finish


@by_sampler
@pytest.mark.parametrize("speculate", [None, sc.NGramDraft(num_draft=3)], ids=["plain", "ngram"])
def test_a_stream_is_the_run_in_pieces(sampler, speculate):
    """Joined pieces are the text, none before it is certain; tokens are the run's."""
    free = alone(0, sampler=sampler, seed=1, max_tokens=20)
    tokens = free.run(20)
    for stops in ({}, {"stop_strings": [free.text[7:10]]}, {"stop_tokens": [tokens[9]]}):
        plain = alone(0, sampler=sampler, seed=1, max_tokens=20, **stops)
        plain.run(20)
        gen = alone(0, sampler=sampler, seed=1, max_tokens=20, num_logprobs=0, **stops)
        pieces = list(gen.stream(speculate=speculate))
        assert [piece.token for piece in pieces] == plain.tokens
        assert "".join(piece.text for piece in pieces) == plain.text
        assert pieces[-1].finish is plain.finish and all(piece.finish is None for piece in pieces[:-1])
        assert [piece.logprob for piece in pieces] == gen.logprobs


def test_a_stream_of_a_batch_names_its_rows():
    plain = start(max_tokens=6)
    plain.run(6)
    gen = start(max_tokens=6)
    gen.run(2)
    pieces = list(gen.stream())
    for row in range(2):
        assert [piece.token for piece in pieces if piece.row == row] == plain.tokens[row][2:]


# Requests to the control.


def test_a_pause_is_taken_up_between_two_tokens():
    """A draft that asks for a pause in the middle of a run: the run returns what it has."""
    plain = alone(0, max_tokens=12).run(12)
    gen = alone(0, max_tokens=12)

    class Asking:
        num_draft = 2

        def propose(self, history, limit):
            if len(history) >= 4 + 5:
                gen.control.pause()
            return []

    got = gen.run(12, speculate=Asking())
    assert 5 <= len(got) < 12 and got == plain[: len(got)] and gen.status is Status.PAUSED
    gen.resume()
    assert got + gen.run(12) == plain


def test_nd5_a_cancelled_run_is_over_and_its_branch_is_not():
    """ND3, ND5: cancelled is for good, also for its snapshots; a branch and a fork live on."""
    gen = start(max_tokens=20)
    wanted = start(max_tokens=20).run(20)
    gen.run(3)
    snap = gen.snapshot()
    branch = gen.fork(snap)
    gen.control.cancel()
    with pytest.raises(sc.LifecycleError, match="cancelled"):
        gen.run(2)
    for call in (gen.step, gen.snapshot, lambda: gen.restore(snap), gen.pause):
        with pytest.raises(sc.LifecycleError, match="cancelled"):
            call()
    gen.exchange(branch)
    gen.run(17)
    assert gen.tokens == wanted and branch.run.lifecycle.status is Status.CANCELLED
    gen.exchange(gen.fork(snap))
    gen.run(17)
    assert gen.tokens == wanted


def test_nd3_a_completed_run_is_revived_by_an_earlier_snapshot_only():
    """ND2, ND3, ND4: a terminal snapshot stays terminal; epochs rise."""
    gen = start(max_tokens=6)
    early = gen.snapshot()
    assert gen.status is Status.PREPARED
    text = gen.run(6)
    late = gen.snapshot()
    assert gen.status is Status.COMPLETED and gen.finish == [Finish.LENGTH] * 2
    gen.restore(early)
    assert (gen.status, gen.epoch) == (Status.PREPARED, 1) and gen.run(6) == text
    gen.restore(late)
    assert (gen.status, gen.epoch) == (Status.COMPLETED, 2)
    with pytest.raises(sc.LifecycleError, match="complete"):
        gen.step()


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"stop_tokens": [16]}, sc.GeometryError, "outside the vocabulary"),
        ({"stop_strings": [""]}, sc.UnsupportedError, "before its first character"),
        ({"stop_strings": ["a\ufffd"]}, sc.UnsupportedError, "never match"),
        ({"num_logprobs": 17}, sc.UnsupportedError, "num_logprobs"),
        ({"num_logprobs": -1}, sc.GeometryError, "num_logprobs"),
    ],
)
def test_settings_that_mean_nothing_leave_the_runtime_alone(options, error, word):
    gen = start(max_tokens=6)
    gen.run(2)
    before = host(gen.runtime.state)
    with pytest.raises(error, match=word):
        sc.Generation(gen.runtime, PROMPTS, **options)
    assert_bits(before, gen.runtime.state)
    gen.run(2)


def test_log_probabilities():
    """They are the model's own, and those of the drawn tokens are among the likeliest asked for."""
    gen = alone(0, sampler=WARM, num_logprobs=16, max_tokens=8)
    tokens = gen.run(5) + gen.run(3, speculate=sc.NGramDraft(num_draft=2))
    case = cases()["decay"]
    state = case.backend.init(case.params, batch=1, capacity=96)
    _, logits = sc.extend(case.backend, case.params, state, [PROMPTS[0] + tokens])
    logits = np.array(logits[0], np.float64)[len(PROMPTS[0]) - 1 : -1]
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(gen.logprobs, wanted[np.arange(8), tokens], atol=1e-5)
    for place, top in enumerate(gen.top_logprobs):
        assert len(top) == 16 and dict(top)[tokens[place]] == gen.logprobs[place]
        assert [logprob for _, logprob in top] == sorted((logprob for _, logprob in top), reverse=True)

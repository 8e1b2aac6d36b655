"""Forced tokens, overrides, constraints and penalties in a running generation."""

import jax
import numpy as np
import pytest
from generations import PROMPTS, WARM, Letters, alone, start
from hypothesis import given
from hypothesis import strategies as st
from test_branching import SAMPLERS, assert_record, by_sampler, record

import statecore as sc
from statecore.generation import Finish, Status
from statecore.generation._constraint import OneOf

LETTERS = Letters()


def one_of(*texts):
    return OneOf.texts(list(texts), LETTERS, vocab_size=16)


# Forced tokens.


@by_sampler
def test_ne4_a_forced_token_is_taken_once(sampler):
    """NE4: one at most, part of a snapshot, one draw where tokens are drawn, cleared without a trace."""
    gen = alone(0, sampler=sampler, max_tokens=30)
    gen.run(3)
    gen.force(7)
    before = record(gen)
    with pytest.raises(sc.LifecycleError, match="pending"):
        gen.force(8)
    assert_record(gen, before)
    snap = gen.snapshot()
    text = gen.run(6)
    assert text[0] == 7
    gen.restore(snap)
    assert gen.run(6, speculate=sc.NGramDraft(num_draft=3)) == text
    gen.restore(snap)
    gen.clear_forced()
    free = alone(0, sampler=sampler, max_tokens=30)
    free.run(3)
    assert gen.run(6) == free.run(6)


def test_ne4_what_cannot_be_forced():
    gen = start(max_tokens=6)
    before = record(gen)
    for call, error in (
        (lambda: gen.force(16), sc.GeometryError),
        (lambda: gen.force(-1), sc.GeometryError),
        (lambda: gen.force(1.0), sc.GeometryError),
        (lambda: gen.force(1, row=2), sc.GeometryError),
        (lambda: gen.clear_forced(row=5), sc.GeometryError),
    ):
        with pytest.raises(error):
            call()
        assert_record(gen, before)
    gen.run(6)
    with pytest.raises(sc.LifecycleError, match="ended"):
        gen.force(1)


def test_a_forced_token_spends_the_draw_of_its_place():
    """Later draws are as if it had been drawn: forcing what would come changes nothing at all."""
    free = start(sampler=WARM, seed=3, max_tokens=12)
    text = free.run(12)
    gen = start(sampler=WARM, seed=3, max_tokens=12)
    for place in range(12):
        gen.force(text[1][place], row=1)
        gen.step()
    assert gen.tokens == text


# Overrides.


def test_ne1_overrides_that_mean_nothing_change_nothing():
    """NE1: refused before any change."""
    gen = start(sampler=WARM, max_tokens=20)
    gen.run(3)
    before = record(gen)
    for settings in (
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"temperature": 0.0, "mirostat": sc.Mirostat()},
        {"top_k": 0},
        {"nothing": 1},
        {"logit_bias": {16: 1.0}},
        {"seed": "x"},
    ):
        with pytest.raises(sc.UnsupportedError):
            gen.override(**settings)
        assert_record(gen, before)


def test_ne2_the_stream_goes_on_over_a_greedy_stretch():
    """NE2: sampled, greedy, sampled: the draws of the later stretch are those of their places."""
    gen = start(sampler=WARM, seed=2, max_tokens=30)
    gen.run(4)
    snap = gen.snapshot()
    gen.override(temperature=0.0)
    greedy = gen.run(3)
    gen.override(temperature=WARM.temperature)
    again = start(sampler=WARM, seed=2, max_tokens=30)
    again.run(4)
    for place in range(3):
        for row in range(2):
            again.force(greedy[row][place], row=row)
        again.step()
    assert gen.run(6) == again.run(6)
    gen.restore(snap)
    gen.override(seed=9)
    reseeded = gen.run(6)
    gen.restore(snap)
    assert gen.run(6) != reseeded


def test_a_run_without_a_seed_must_be_given_one_to_draw():
    """NE1: sampling without a key is refused, at the start and later."""
    with pytest.raises(sc.UnsupportedError, match="seed"):
        start(sampler=WARM, seed=None)
    gen = start(seed=None, max_tokens=20)
    gen.run(2)
    with pytest.raises(sc.UnsupportedError, match="seed"):
        gen.override(temperature=0.7)
    gen.override(temperature=0.7, seed=4)
    gen.run(2)


def test_ne3_switching_penalties_on_counts_the_history():
    """NE3: as if they had been on, and nothing is drawn or run for it."""
    penal = SAMPLERS["penalties"]
    gen = start(sampler=sc.Sampler(temperature=0.9), seed=1, max_tokens=20)
    text = gen.run(6)
    length = gen.runtime.lengths.tolist()
    gen.override(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    assert gen.runtime.lengths.tolist() == length
    other = start(sampler=penal, seed=1, max_tokens=20)
    for place in range(6):
        for row in range(2):
            other.force(text[row][place], row=row)
        other.step()
    assert gen.run(8) == other.run(8)


# Penalties.


@given(rights=st.lists(st.booleans(), min_size=1, max_size=6))
@pytest.mark.parametrize("name", ["penalties", "mirostat"])
def test_f75_speculation_counts_every_accepted_token(name, rights):
    """F75: accepting three tokens moves the counts by three, and the text is plain decoding's."""
    from test_endings import known

    sampler = SAMPLERS[name]
    plain = start(sampler=sampler, seed=2, max_tokens=16)
    text = plain.run(16)
    gen = start(sampler=sampler, seed=2, max_tokens=16)
    gen.run(16, speculate=known(text, rights))
    assert gen.tokens == text
    left, right = plain._run.sampling, gen._run.sampling
    if name == "penalties":
        np.testing.assert_array_equal(np.array(left.counts), np.array(right.counts))
        assert np.array(left.counts).sum() == 32
    else:
        np.testing.assert_array_equal(np.array(left.mu), np.array(right.mu))


# Constraints.


@by_sampler
def test_a_constraint_shapes_the_text_and_ends_it(sampler):
    texts = ["abc", "abde", "ghi.", "jj"]
    gen = alone(0, sampler=sampler, max_tokens=30, constraint=one_of(*texts))
    gen.run(30)
    assert gen.text in texts and gen.finish is Finish.CONSTRAINT and gen.status is Status.COMPLETED


@pytest.mark.parametrize("name", ["greedy", "sampled", "mirostat"])
def test_a_constraint_is_part_of_a_snapshot_and_of_a_fork(name):
    """NC1: its place is saved with the rest; branches do not share it."""
    texts = ["abcabcabc", "abcabdabc", "abdabdabd", "bbbbbbbbb"]
    gen = start(sampler=SAMPLERS[name], max_tokens=30, constraint=[one_of(*texts), None])
    gen.run(2)
    snap = gen.snapshot()
    wanted = gen.run(20)
    gen.restore(snap)
    branches = gen.fork(snap, n=2)
    for branch in branches:
        gen.exchange(branch)
        gen.run(20)
        assert LETTERS.decode(gen.tokens[0]) in texts
        gen.exchange(branch)
    assert gen.run(20) == wanted


@by_sampler
def test_speculation_under_a_constraint_is_plain_decoding(sampler):
    """A draft that repeats the texts and one that breaks the rules."""
    texts = ["abcabcabcabd", "abcabcabcabc."]
    plain = alone(0, sampler=sampler, max_tokens=30, constraint=one_of(*texts))
    plain.run(30)

    class Rude:
        num_draft = 4

        def propose(self, history, limit):
            output = len(history) - 4
            return [*LETTERS.encode(texts[output % 2])[output:][:2], 15, 15][:limit]

    for draft in (sc.NGramDraft(num_draft=4), Rude()):
        gen = alone(0, sampler=sampler, max_tokens=30, constraint=one_of(*texts))
        gen.run(30, speculate=draft)
        assert gen.tokens == plain.tokens and gen.finish is plain.finish


def test_a_forced_token_must_be_allowed():
    gen = alone(0, max_tokens=9, constraint=one_of("abc", "def"))
    with pytest.raises(sc.UnsupportedError, match="forbids"):
        gen.force(2)
    gen.force(3)
    gen.run(9)
    assert gen.text == "def"


class Unknown(OneOf):
    """A constraint that does not know its size."""

    def nbytes(self):
        return None

    def copy(self):
        other = object.__new__(Unknown)
        other.__dict__.update(self.__dict__)
        return other


def test_nb1_an_unknown_owner_stops_snapshots_not_steps():
    """NB1: the refusal names the owner and changes no usage; stepping still works."""
    texts = ["abc", "def"]
    grammar = Unknown([LETTERS.encode(text) for text in texts], vocab_size=16)
    gen = alone(0, max_tokens=9, constraint=grammar)
    gen.enable_snapshots(sc.SnapshotLimits())
    usage, before = gen.usage, record(gen)
    support = gen.support()
    assert not support.is_supported and "constraint" in support.owner and gen.estimate() is None
    with pytest.raises(sc.BudgetError, match="constraint of sequence 0"):
        gen.snapshot()
    assert gen.usage == usage
    assert_record(gen, before)
    gen.run(9)
    assert gen.text in texts


def test_constraints_of_another_vocabulary():
    with pytest.raises(sc.GeometryError, match="vocab|masks"):
        start(constraint=OneOf([[1, 2]], vocab_size=10))
    with pytest.raises(sc.GeometryError, match="constraints"):
        start(constraint=[None])


def test_sampled_text_differs_by_seed_and_repeats_by_seed():
    texts = {seed: start(sampler=WARM, seed=seed, max_tokens=12).run(12) for seed in (1, 2)}
    assert texts[1] != texts[2] and start(sampler=WARM, seed=jax.random.key(1), max_tokens=12).run(12) == texts[1]
    assert PROMPTS[0] != PROMPTS[1]

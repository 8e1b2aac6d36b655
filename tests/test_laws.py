"""DESIGN's laws 1, 2, 3, 4 and 8 on the toys, over generated cases."""

import numpy as np
import pytest
from helpers import CAPACITY, CASE_NAMES, cases, poisoned
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore import testing
from statecore.testing import strategies

WIDTH = 7  # longer than the convolution (3) and the attention window (4)
by_case = pytest.mark.parametrize("name", CASE_NAMES)


@by_case
@given(data=st.data())
def test_law_1_commit_is_steps(name, data):
    case = cases()[name]
    state = case.state(length=data.draw(st.integers(0, 12)))
    window = data.draw(strategies.windows(vocab_size=case.vocab_size, batch=2, width=WIDTH))
    mode = data.draw(st.sampled_from(case.modes))
    testing.check_commit(
        case.backend,
        case.params,
        state,
        window.tokens,
        window.num_accepted,
        num_valid=window.num_valid,
        mode=mode,
        tolerance=case.mode_tolerance(mode),
    )


@by_case
@given(data=st.data())
def test_law_1_again_and_again(name, data):
    """Windows after windows: the ring wraps several times, and stale rows stand in it."""
    case = cases()[name]
    state = case.state(length=3)
    for _ in range(4):
        window = data.draw(strategies.windows(vocab_size=case.vocab_size, batch=2, width=WIDTH))
        state = testing.check_commit(
            case.backend,
            case.params,
            state,
            window.tokens,
            window.num_accepted,
            num_valid=window.num_valid,
            tolerance=case.mode_tolerance(case.modes[-1]),
        )


@by_case
@given(data=st.data())
def test_law_2_chunks_are_steps(name, data):
    case = cases()[name]
    tokens = data.draw(strategies.tokens(vocab_size=case.vocab_size, batch=2, length=12))
    cuts = data.draw(strategies.cuts(length=12))
    testing.check_chunks(case.backend, case.params, case.state(length=5), tokens, cuts)


@by_case
@given(data=st.data())
def test_law_2_padding_never_enters(name, data):
    case = cases()[name]
    batch = data.draw(strategies.batches(vocab_size=case.vocab_size, batch=2, length=12))
    state = case.state(length=data.draw(st.integers(0, 12)))
    testing.check_padding(case.backend, case.params, state, batch.tokens, batch.num_valid)


@by_case
def test_law_2_chunks_of_one_and_of_none(name):
    case = cases()[name]
    tokens = np.arange(6).reshape(1, 6).repeat(2, 0)
    testing.check_chunks(case.backend, case.params, case.state(), tokens, [0, 0, 1, 2, 3, 4, 5, 6])


@by_case
def test_law_3_exchange(name):
    case = cases()[name]
    testing.check_exchange(case.state(length=3), case.state(length=9))


@by_case
@given(data=st.data())
def test_law_4_captures_never_change(name, data):
    case = cases()[name]
    tokens = data.draw(strategies.tokens(vocab_size=case.vocab_size, batch=2, length=5))
    testing.check_capture(case.backend, case.params, case.state(length=4), tokens)


@by_case
def test_law_4_capture_into_a_poisoned_destination(name):
    case = cases()[name]
    state = case.state(length=7)
    saved = sc.capture(state, into=poisoned(state))
    assert sc.equal(case.backend, saved, state)


@by_case
@given(data=st.data())
def test_law_8_every_plane_matters(name, data):
    case = cases()[name]
    testing.check_every_plane(case.backend, case.state(length=data.draw(st.integers(0, 12))))


@by_case
def test_unreadable_rows_do_not_matter(name):
    """A state that was laid over NaN and absurd integers goes on like any other."""
    case = cases()[name]
    clean = case.state(length=6)
    dirty = {
        plane: leaf if plane not in ("kv", "history") else leaf.at[:, 6:].set(-(2**30)) for plane, leaf in clean.items()
    }
    assert sc.equal(case.backend, clean, dirty)
    tokens = np.full((2, 3), 5)
    after, logits = sc.extend(case.backend, case.params, clean, tokens)
    after_dirty, logits_dirty = sc.extend(case.backend, case.params, dirty, tokens)
    assert sc.equal(case.backend, after, after_dirty)
    np.testing.assert_array_equal(np.array(logits), np.array(logits_dirty))


@pytest.mark.parametrize("mutant", [testing.forgets_conv, testing.off_by_one, testing.clamps])
@pytest.mark.parametrize("name", ["digit", "digit-own"])
def test_laws_catch_the_mutants(name, mutant):
    backend = mutant(cases()[name].backend)
    state = backend.init(None, batch=2, capacity=CAPACITY)
    with pytest.raises(testing.LawViolation) as caught:
        for num_rows in range(5):
            testing.check_commit(backend, None, state, [[4, 5, 6, 7], [1, 2, 3, 4]], [num_rows, 4 - num_rows])
    assert "conv" in caught.value.paths
    if mutant is not testing.forgets_conv:
        assert "h" in caught.value.paths


@given(data=st.data())
def test_digit_states_spell_their_history(data):
    """The oracle knows nothing of states: it spells the whole history with NumPy."""
    backend = cases()["digit"].backend
    state, histories = backend.init(None, batch=2, capacity=CAPACITY), [[], []]
    for _ in range(2):
        window = data.draw(strategies.windows(vocab_size=10, batch=2, width=4))
        opened = sc.verify(backend, None, state, window.tokens, num_valid=window.num_valid)
        state = sc.commit(backend, opened, window.num_accepted)
        for row, kept in enumerate(window.num_accepted):
            histories[row] += window.tokens[row, :kept].tolist()
        assert str(testing.digit_rows(state)) == str(testing.digit_oracle(histories))


def test_decay_agrees_with_its_oracle():
    case = cases()["decay"]
    tokens = np.arange(20) % 16
    state = case.backend.init(case.params, capacity=CAPACITY)
    state, _ = sc.extend(case.backend, case.params, state, tokens[None])
    np.testing.assert_allclose(np.array(state["h"])[:, 0], testing.decay_oracle(tokens), rtol=1e-5)

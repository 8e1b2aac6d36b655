"""Faults seen in other systems, each by its id, with the inputs and the right value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits, cases, host, poisoned, refuses

import statecore as sc
from statecore import planes as pl
from statecore import testing

by_digit = pytest.mark.parametrize("name", ["digit", "digit-own"])
RIGHT = {
    0: (123, [1, 2, 3]),
    1: (1234, [2, 3, 4]),
    2: (12345, [3, 4, 5]),
    3: (123456, [4, 5, 6]),
    4: (1234567, [5, 6, 7]),
}


def prompted(backend: sc.Backend, prompt: list[int], capacity: int = 16):
    state = backend.init(None, capacity=capacity)
    return sc.extend(backend, None, state, np.array([prompt], int).reshape(1, -1))[0]


def kept(backend: sc.Backend, state, window: list[int], num_rows: int, **options):
    return sc.commit(backend, sc.verify(backend, None, state, [window], **options), num_rows)


@by_digit
@pytest.mark.parametrize("num_rows", range(5))
def test_f01_f02_f07_every_part_goes_back(name, num_rows):
    """F01, F02, F07: h, conv and length for 0 to all rows; 0 and all are exact too."""
    backend = cases()[name].backend
    state = kept(backend, prompted(backend, [1, 2, 3]), [4, 5, 6, 7], num_rows)
    h, conv = RIGHT[num_rows]
    assert (state["h"].item(), state["conv"][0].tolist(), state["pos"].item()) == (h, conv, 3 + num_rows)


def test_f01_a_plane_that_cannot_go_back_refuses_before_anything_moves():
    """F01: the error names the opaque plane; keeping all rows is no rollback."""
    backend = sc.Backend(
        name="opaque",
        init=lambda params, batch, capacity: {"seen": jnp.zeros(batch, jnp.int32), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: (
            {"seen": state["seen"] * 3 + tokens, "pos": state["pos"] + 1},
            jnp.zeros((tokens.shape[0], 10)),
        ),
        planes={"seen": pl.opaque(), "pos": pl.position()},
    )
    state = backend.init(None, batch=2, capacity=8)
    window = sc.verify(backend, None, state, [[1, 2], [3, 4]], num_valid=[2, 1])
    for count in (0, 1, [1, 1], [2, 0]):
        refuses(sc.RollbackError, lambda count=count: sc.commit(backend, window, count), window.state, "`seen`")
    assert sc.commit(backend, window, [2, 1])["seen"].tolist() == [5, 3]
    refused = jax.jit(lambda s: sc.commit(backend, sc.verify(backend, None, s, jnp.ones((2, 2), int)), 1))(state)
    assert bool(sc.is_refused(backend, refused))
    assert sc.clear_refusal(backend, refused)["seen"].tolist() == [0, 0]


@by_digit
def test_f03_a_window_longer_than_the_taps(name):
    """F03: five rows over three taps, none kept."""
    backend = cases()[name].backend
    state = kept(backend, prompted(backend, [1, 2, 3]), [4, 5, 6, 7, 8], 0)
    assert state["conv"][0].tolist() == [1, 2, 3]


@by_digit
def test_f06_placeholders_never_enter(name):
    """F06: a window [4, P, P, P] with one valid row."""
    backend = cases()[name].backend
    state = kept(backend, prompted(backend, [1, 2, 3]), [4, -1, 99, -1], 1, num_valid=1)
    assert (state["h"].item(), state["conv"][0].tolist()) == (1234, [2, 3, 4])


@by_digit
def test_f08_undo_of_everything_is_the_state_before(name):
    """F08: three rows decoded at once and all undone."""
    backend = cases()[name].backend
    before = prompted(backend, [1, 2, 3])
    assert sc.equal(backend, kept(backend, before, [7, 8, 9], 0), before)


@by_digit
def test_f17_a_chunk_goes_on_from_a_warm_state(name):
    """F17: 123 and then [4, 5] is 12345, not 45, and the convolution knows [1, 2, 3]."""
    backend = cases()[name].backend
    state, _ = sc.extend(backend, None, prompted(backend, [1, 2, 3]), [[4, 5]])
    assert (state["h"].item(), state["conv"][0].tolist()) == (12345, [3, 4, 5])


@by_digit
def test_f34_f35_a_saved_state_does_not_change(name):
    """F34, F35: the slot keeps its bits, and two runs from it agree."""
    backend = cases()[name].backend
    state = prompted(backend, [1, 2, 3])
    saved = sc.capture(state)
    before = host(saved)
    for token in (9, 9, 9):
        state, _ = sc.step(backend, None, state, [token], donate=True)
    assert_bits(before, saved)
    runs = []
    for _ in range(2):
        run = sc.copy(saved)
        for token in (4, 5):
            run, logits = sc.step(backend, None, run, [token], donate=True)
        runs.append((host(run), np.array(logits)))
    assert str(runs[0]) == str(runs[1])
    assert_bits(before, saved)


def test_f44_reuse_after_donation_names_the_plane():
    """F44: our error with the path, not the runtime's message."""
    backend = cases()["digit"].backend
    state = prompted(backend, [1, 2, 3])
    sc.step(backend, None, state, [4], donate=True)
    with pytest.raises(sc.StateConsumedError, match="`conv`.*donate=True"):
        sc.step(backend, None, state, [4])


@pytest.mark.parametrize("length", [3, 4, 5, 11])
@by_digit
def test_f49_rings_at_before_and_past_the_window(name, length):
    """F49: W - 1, W, W + 1 and 2 W + 3 tokens, saved over a poisoned slot and gone on from."""
    backend = cases()[name].backend
    tokens = [(3 * i + 1) % 10 for i in range(length)]
    state = prompted(backend, tokens, capacity=32)
    saved = sc.capture(state, into=poisoned(state))
    more = [[5, 6, 7, 8, 9]]
    straight, logits = sc.extend(backend, None, state, more)
    restored, restored_logits = sc.extend(backend, None, saved, more)
    assert sc.equal(backend, straight, restored)
    np.testing.assert_array_equal(np.array(logits), np.array(restored_logits))
    assert str(testing.digit_rows(restored)) == str(testing.digit_oracle([tokens + more[0]]))


@by_digit
def test_f67_padding_does_not_change_a_prompt(name):
    """F67: a padded prompt gives h = 123 and conv = [1, 2, 3], batched with a longer one."""
    backend = cases()[name].backend
    state = backend.init(None, batch=2, capacity=16)
    state, _ = sc.extend(backend, None, state, [[1, 2, 3, 0, 0], [5, 4, 3, 2, 1]], num_valid=[3, 5])
    assert (state["h"].tolist(), state["conv"][0].tolist()) == ([123, 54321], [1, 2, 3])


@by_digit
def test_f69_prompts_shorter_than_the_taps(name):
    """F69: [1] gives conv [0, 0, 1]; an empty prompt is no fault."""
    backend = cases()[name].backend
    assert prompted(backend, [1])["conv"][0].tolist() == [0, 0, 1]
    empty = prompted(backend, [])
    assert sc.equal(backend, empty, backend.init(None, capacity=16))
    assert sc.step(backend, None, empty, [7])[0]["h"].item() == 7


@pytest.mark.parametrize("counts", [[0, 0], [2, 0], [1, 3]])
def test_rejected_rows_may_hold_nan(counts):
    """What a dropped row holds does not matter, even NaN: selection, not multiplication."""
    case = cases()["decay"]
    window = sc.verify(case.backend, case.params, case.state(length=5), [[1, 2, 3, 4], [4, 3, 2, 1]])
    (steps,) = window.trace["steps"]  # [K, L, B, N]
    for row, count in enumerate(counts):
        steps = steps.at[count:, :, row].set(jnp.nan)
    poison = dataclasses.replace(window, trace=window.trace | {"steps": [steps]})
    clean = sc.commit(case.backend, window, counts)
    assert sc.equal(case.backend, sc.commit(case.backend, poison, counts), clean)


def test_f04_every_shift_plane_goes_back():
    """F04: two convolutions and a recurrence in one layer, three rows of four kept."""

    def step(params, state, tokens):
        slide = lambda plane: jnp.concatenate([plane[:, 1:], tokens[:, None]], axis=1)  # noqa: E731
        new = {"q": slide(state["q"]), "v": slide(state["v"]), "h": state["h"] * 10 + tokens, "pos": state["pos"] + 1}
        return new, jnp.zeros((tokens.shape[0], 10))

    def init(params, batch, capacity):
        taps = {"q": jnp.zeros((batch, 3), jnp.int32), "v": jnp.zeros((batch, 2), jnp.int32)}
        return taps | {"h": jnp.zeros(batch, jnp.int32), "pos": jnp.zeros(batch, jnp.int32)}

    planes = {"q": pl.shift(axis=1), "v": pl.shift(axis=1), "h": pl.recurrent(), "pos": pl.position()}
    backend = sc.Backend(name="two taps", init=init, step=step, planes=planes)
    state = kept(backend, prompted(backend, [1, 2, 3]), [4, 5, 6, 7], 3)
    assert (state["q"].tolist(), state["v"].tolist(), state["h"].item()) == ([[4, 5, 6]], [[5, 6]], 123456)


@by_digit
def test_f12_the_first_window_can_be_undone(name):
    """F12: an empty state is a state; after its undoing the first token is the first."""
    backend = cases()[name].backend
    empty = sc.capture(backend.init(None, capacity=16))
    undone = kept(backend, empty, [1, 2], 0)
    assert sc.equal(backend, undone, empty)
    assert sc.step(backend, None, undone, [7])[0]["h"].item() == 7


@by_digit
def test_f46_restoring_again_and_again_is_the_same(name):
    """F46: five runs from one slot, past the ring's wrap."""
    backend = cases()[name].backend
    runtime = sc.Runtime(sc.load((backend, None)), capacity=64)
    runtime.extend([[1, 2, 3, 4, 5]])
    slot, found = runtime.capture(), set()
    for _ in range(5):
        runtime.exchange(runtime.copy(slot))
        logits = [np.array(runtime.step([token % 10])).tobytes() for token in range(20)]
        found.add((tuple(logits), str(testing.digit_rows(runtime.state))))
    assert len(found) == 1

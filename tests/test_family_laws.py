"""The laws on every family: chunks, steps, commits at every count, captures, ragged batches, past the ring."""

import numpy as np
import pytest
from families import NAMES, fixture

import statecore as sc
from statecore import testing

WIDTH = 5
every = pytest.mark.parametrize("name", NAMES)
# Each compiles several functions of each family.
pytestmark = pytest.mark.slow


def start(found):
    """Returns a state past every window, so that rings have wrapped, and the tokens that follow."""
    state, _ = found.read(found.ids[:, :14])
    return state, found.ids[:, 14 : 14 + WIDTH]


@every
@pytest.mark.parametrize(("mode", "tolerance"), [("exact", None), ("fast", 1e-4)])
def test_law_1_commit_is_steps(name, mode, tolerance):
    """At every count, the rows of a batch at different ones; exact in bits."""
    found = fixture(name)
    state, window = start(found)
    for num_accepted in [[n, WIDTH - n] for n in range(WIDTH + 1)]:
        testing.check_commit(
            found.model.backend, found.model.params, state, window, num_accepted, mode=mode, tolerance=tolerance
        )


@every
def test_law_1_a_verify_reads_what_steps_read(name):
    """A window's logits are those of the reference, and recurrent planes are left alone."""
    found = fixture(name)
    state, window = start(found)
    before = {path: np.array(leaf) for path, leaf in found.model.backend.layout.named(state)}
    opened = sc.verify(found.model.backend, found.model.params, state, window)
    np.testing.assert_allclose(
        np.array(opened.logits), found.logits[:, 14 : 14 + WIDTH], rtol=0, atol=found.tolerance * 2
    )
    for plane, (path, leaf) in zip(
        found.model.backend.layout.planes, found.model.backend.layout.named(opened.state), strict=True
    ):
        if plane.kind in ("shift", "recurrent", "position"):
            np.testing.assert_array_equal(np.array(leaf), before[path])


@every
def test_law_2_chunks_are_steps(name):
    """However a text is cut, and with padding in every row."""
    found = fixture(name)
    state = found.empty()
    for cuts in ([], [10], [5, 10, 15]):
        testing.check_chunks(
            found.model.backend, found.model.params, state, found.ids[:, :20], cuts=cuts, tolerance=1e-4
        )
    testing.check_padding(found.model.backend, found.model.params, state, found.ids[:, :8], [3, 8], tolerance=1e-4)


@every
def test_laws_3_4_7_a_slot_goes_back(name):
    """F48, F58: capture, run on past the ring's end, go back, and run the same again."""
    found = fixture(name)
    runtime = sc.Runtime(found.model, batch=2, capacity=48)
    runtime.extend(found.ids[:, :9])
    slot = runtime.capture()
    runs = []
    for _ in range(2):
        held = runtime.copy(slot)
        runtime.exchange(held)
        logits = [np.array(runtime.step(column)) for column in found.ids[:, 9:19].T]
        runs.append(logits)
        assert runtime.lengths.tolist() == [19, 19]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_allclose(runs[0][0], found.logits[:, 9], rtol=0, atol=found.tolerance)


@every
def test_speculation_changes_no_token(name):
    found = fixture(name)
    outputs = []
    for draft in (None, sc.NGramDraft(num_draft=3)):
        runtime = sc.Runtime(found.model, batch=2, capacity=96)
        gen = sc.Generation(runtime, found.ids[:, :9].tolist(), max_tokens=24, lossless=True)
        outputs.append(gen.run(24, speculate=draft))
    assert outputs[0] == outputs[1]

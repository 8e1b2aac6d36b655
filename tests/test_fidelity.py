"""Each family agrees with its reference: logits of whole texts, states after a prefix, whatever the padding."""

import jax
import numpy as np
import pytest
from families import NAMES, document_rows, fixture, layout_of, planes_like, table_rows

import statecore as sc
from statecore.models import right_padded

every = pytest.mark.parametrize("name", NAMES)


@every
def test_logits_are_those_of_the_reference(name):
    """And the fixture would show an error: its logits have a standard deviation near one."""
    found = fixture(name)
    assert 0.7 < found.logits.std() < 1.4
    _, logits = found.read(found.ids)
    np.testing.assert_allclose(np.array(logits), found.logits, rtol=0, atol=found.tolerance)


@every
def test_states_are_those_of_the_reference(name):
    """F18: after a prefix: every tensor of its cache is found in ours, and of a window the last rows."""
    found = fixture(name)
    state, _ = found.read(found.ids, num_valid=found.prefix)
    pairs = planes_like(found.model.backend.layout, state, found.prefix, found.states)
    assert pairs.keys() == found.states.keys()
    for part, (ours, theirs) in pairs.items():
        scale = max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=found.tolerance * scale, err_msg=part)


@every
def test_single_steps_are_the_reference(name):
    """F51: a prefix, then one token after another."""
    found = fixture(name)
    state, _ = found.read(found.ids, num_valid=found.prefix)
    for column in range(found.prefix, found.ids.shape[1]):
        state, logits = sc.step(found.model.backend, found.model.params, state, found.ids[:, column])
        np.testing.assert_allclose(np.array(logits), found.logits[:, column], rtol=0, atol=found.tolerance)


@every
def test_padded_batches_are_the_unpadded(name):
    """Right- and left-padded rows of different lengths, whatever the padding holds."""
    found = fixture(name)
    length = found.ids.shape[1]
    counts = np.array([length, length - 6])
    right = np.where(np.arange(length) < counts[:, None], found.ids, 7)
    left = np.array([np.roll(row, length - count) for row, count in zip(right, counts, strict=True)])
    mask = np.arange(length) >= (length - counts)[:, None]
    for ids, num_valid in ((right, counts), right_padded(left, mask)):
        _, logits = found.read(ids, num_valid=num_valid)
        for row, count in enumerate(counts):
            np.testing.assert_allclose(
                np.array(logits[row, :count]), found.logits[row, :count], rtol=0, atol=found.tolerance
            )


@pytest.mark.parametrize("name", [name for name in NAMES if layout_of(name).indices("shift")])
def test_f69_prompts_shorter_than_the_convolution(name):
    """One token leaves zeros before it in every shift plane, and none leaves the empty state."""
    found = fixture(name)
    state, logits = found.read(found.ids, num_valid=[1, 0])
    np.testing.assert_allclose(np.array(logits[0, 0]), found.logits[0, 0], rtol=0, atol=found.tolerance)
    layout, empty = found.model.backend.layout, found.empty()
    for plane, leaf, start in zip(layout.planes, layout.leaves(state), layout.leaves(empty), strict=True):
        if plane.kind == "shift":
            assert not np.array(leaf[:, 0, :-1]).any() and np.array(leaf[:, 0, -1]).any()
        if plane.kind in ("shift", "recurrent"):
            np.testing.assert_array_equal(np.array(leaf[:, 1]), np.array(start[:, 1]))


@every
def test_recurrent_planes_are_float32_in_half_precision(name):
    """And rows of keys and values are of the parameters' dtype, as in the reference."""
    found = fixture(name)
    config = {"architecture": found.model.name} | _config(name)
    geometry = sc.default_registry().lookup(config).geometry(capacity=32, dtype="bfloat16")
    for plane in geometry.planes:
        if plane.plane.kind != "position":
            assert plane.dtype == ("float32" if plane.plane.kind == "recurrent" else "bfloat16"), plane.path


@every
def test_a_state_has_a_dozen_leaves_at_most(name):
    assert len(jax.tree.leaves(fixture(name).empty())) <= 12


def test_the_document_shows_what_these_tests_show():
    """Its table has every family, its planes and its tolerance; what was reached differs from machine to machine."""
    shown, found = document_rows(), table_rows()
    assert [row[:-1] for row in shown] == [row[:-1] for row in found]
    for row in (*shown, *found):
        assert float(row[-1]) <= float(row[-2])


def _config(name):
    from families import FOLDER

    from statecore.models.files import open_folder

    return open_folder(FOLDER / name).config

"""The laws on the embedded model, its own passes against each other, and its weights."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits, host, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

import statecore as sc
from statecore import testing
from statecore.models import TinyHybridConfig, forward, tiny_hybrid
from statecore.models.mixers import _recurrence
from statecore.testing import strategies

CAPACITY = 160
WIDTH = 9  # longer than the convolution; the attention window is 64, of a ring of 96
VOCAB = 256
DECODER = tiny_hybrid(TinyHybridConfig())
few = settings(max_examples=12)
# Around the attention window, and where windows wrap the ring.
LENGTHS = [0, 1, 3, 63, 64, 65, 90, 95, 96, 131]
TEXT = np.random.default_rng(7).integers(32, 123, (2, CAPACITY)).astype(np.int32)


@pytest.fixture(scope="module")
def states(tiny):
    """States of two sequences by length, made once."""
    made = {}
    for length in LENGTHS:
        state = tiny.backend.init(tiny.params, batch=2, capacity=CAPACITY)
        made[length], _ = sc.extend(tiny.backend, tiny.params, state, TEXT[:, :128], num_valid=min(length, 128))
        for column in TEXT[:, 128:length].T:
            made[length], _ = sc.step(tiny.backend, tiny.params, made[length], column)
    return made


def test_the_geometry(tiny):
    geometry = tiny.geometry(batch=1, capacity=256)
    assert len(geometry.planes) == 7
    kinds = {plane.plane.kind for plane in geometry.planes}
    assert kinds == {"append", "sliding", "shift", "recurrent", "position"}
    hidden = next(plane for plane in geometry.planes if plane.path == "hidden")
    assert hidden.dtype == jnp.float32
    assert 1e6 < sum(leaf.size for leaf in jax.tree.leaves(tiny.params)) < 3e6


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "tolerance"), [("exact", None), ("fast", 1e-5)])
@few
@given(data=st.data())
def test_law_1_exact_has_the_bits_of_decoding(tiny, states, mode, tolerance, data):
    """And `fast` is equal up to rounding."""
    window = data.draw(strategies.windows(vocab_size=VOCAB, batch=2, width=WIDTH))
    state = states[data.draw(st.sampled_from(LENGTHS))]
    testing.check_commit(
        tiny.backend,
        tiny.params,
        state,
        window.tokens,
        window.num_accepted,
        num_valid=window.num_valid,
        mode=mode,
        tolerance=tolerance,
    )


def test_verify_leaves_the_recurrent_state_untouched(tiny, states):
    window = sc.verify(tiny.backend, tiny.params, states[65], TEXT[:, :WIDTH])
    for plane in ("conv", "hidden", "position"):
        np.testing.assert_array_equal(np.array(window.state[plane]), np.array(states[65][plane]))
    assert sc.equal(tiny.backend, sc.commit(tiny.backend, window, 0), states[65])


@pytest.mark.parametrize("counts", [[0, 9], [4, 1], [8, 9]])
def test_dropped_rows_may_hold_nan(tiny, states, counts):
    """Rows of the trace past the kept ones are NaN, as are the attention rows they wrote."""
    window = sc.verify(tiny.backend, tiny.params, states[65], TEXT[:, :WIDTH])
    dropped = np.arange(WIDTH) >= np.array(counts)[:, None]  # [B, K]

    def poison(leaf):
        return jnp.where(dropped.reshape(1, *dropped.shape, *[1] * (leaf.ndim - 3)), jnp.nan, leaf)

    state = dict(window.state)
    for row, count in enumerate(counts):
        rows = np.arange(65 + count, 65 + WIDTH)
        for plane in ("key", "value"):
            state[plane] = state[plane].at[:, row, rows].set(jnp.nan)
        for plane in ("ring_key", "ring_value"):
            state[plane] = state[plane].at[:, row, rows % TinyHybridConfig().ring_rows].set(jnp.nan)
    dirty = dataclasses.replace(window, state=state, trace=jax.tree.map(poison, window.trace))
    clean_state, dirty_state = (sc.commit(tiny.backend, opened, counts) for opened in (window, dirty))
    assert sc.equal(tiny.backend, clean_state, dirty_state)
    for advance in (
        lambda state: sc.step(tiny.backend, tiny.params, state, [65, 66])[1],
        lambda state: sc.extend(tiny.backend, tiny.params, state, TEXT[:, :WIDTH])[1],
        lambda state: sc.verify(tiny.backend, tiny.params, state, TEXT[:, :WIDTH]).logits,
    ):
        np.testing.assert_array_equal(np.array(advance(clean_state)), np.array(advance(dirty_state)))


@pytest.mark.parametrize("counts", [[0, 4], [4, 1], [3, 4]])
def test_replay_has_the_bits_of_rows_one_by_one(counts):
    """S34: at every count, ragged, and whatever the rejected rows hold, -0.0 included."""
    keys = jax.random.split(jax.random.key(1), 4)
    drive = _recurrence.Drive(
        -jax.random.uniform(keys[0], (3, 2, 4, 5)),
        jax.random.normal(keys[1], (3, 2, 4, 5, 16)),
        jax.random.normal(keys[2], (3, 2, 4, 1, 32)),
    )
    start = jax.random.normal(keys[3], (3, 2, 5, 16, 32)).at[0].set(-0.0)
    kept = np.arange(4) < np.array(counts)[:, None]
    holes = [kept[None, ..., *[None] * (leaf.ndim - 3)] for leaf in drive]
    dirty = _recurrence.Drive(*[jnp.where(hole, leaf, jnp.nan) for hole, leaf in zip(holes, drive, strict=True)])
    replay = jax.jit(_recurrence.replay)
    expected = start
    for row in range(4):
        one = jax.tree.map(lambda leaf, row=row: leaf[:, :, row : row + 1], dirty)
        expected = replay(expected, one, jnp.array(kept[:, row], jnp.int32))
    found = replay(start, dirty, jnp.array(counts, jnp.int32))
    assert np.array(found).tobytes() == np.array(expected).tobytes()


@few
@given(data=st.data())
def test_law_2_chunks_within_rounding(tiny, states, data):
    """Chunks of fixed lengths, so that each is compiled once; padding in the last."""
    state = states[data.draw(st.sampled_from(LENGTHS[:-1]))]
    batch = data.draw(strategies.batches(vocab_size=VOCAB, batch=2, length=WIDTH))
    testing.check_padding(tiny.backend, tiny.params, state, batch.tokens, batch.num_valid, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[], [0], [1, 1, 2], [9, 18]])
def test_law_2_cuts(tiny, states, cuts):
    testing.check_chunks(tiny.backend, tiny.params, states[63], TEXT[:, :27], cuts, tolerance=1e-5)


@pytest.mark.parametrize("counts", [[5, 5], [0, 3], [1, 5]])
def test_the_last_logits_are_those_of_all(tiny, states, counts):
    """They are computed alone, whatever rows a sequence has, and NaN where it has none."""
    state, tokens = states[0], [list(b"to be"), list(b"or no")]
    after, logits = sc.extend(tiny.backend, tiny.params, state, tokens, num_valid=counts)
    alone, last = sc.extend(tiny.backend, tiny.params, state, tokens, num_valid=counts, logits="last")
    assert_bits(after, alone)
    for row, count in enumerate(counts):
        wanted = np.array(logits[row, count - 1]) if count else np.full(256, np.nan, np.float32)
        np.testing.assert_allclose(np.array(last[row]), wanted, rtol=0, atol=1e-5)


def test_f49_law_2_across_the_whole_ring(tiny):
    """F49, F70: one chunk longer than the ring, against steps, and against the training pass."""
    state = tiny.backend.init(tiny.params, batch=2, capacity=CAPACITY)
    got, logits = sc.extend(tiny.backend, tiny.params, state, TEXT[:, :128])
    steps = testing.raw_states(tiny.backend, tiny.params, state, TEXT[:, :128])
    testing.assert_same(tiny.backend, got, steps[-1], law="chunks", case="128 tokens", tolerance=1e-5)
    passed = jax.jit(partial(forward, DECODER))(tiny.params, TEXT[:, :128])
    np.testing.assert_allclose(np.array(logits), np.array(passed), atol=1e-4)


def test_law_3_exchange(states):
    testing.check_exchange(states[3], states[64])


def test_law_4_captures_never_change(tiny, states):
    testing.check_capture(tiny.backend, tiny.params, sc.copy(states[95]), TEXT[:, :4])


@pytest.mark.parametrize("length", LENGTHS)
def test_f49_law_8_saved_over_poison_and_every_plane_seen(tiny, states, length):
    """F49: at, before and past the window's and the ring's wrap."""
    saved = sc.capture(states[length], into=poisoned(states[length]))
    assert sc.equal(tiny.backend, saved, states[length])
    testing.check_every_plane(tiny.backend, saved)


def test_law_8_every_plane_moves_the_next_logits(tiny, states):
    """A changed element is not only seen by `equal`: the model goes on differently."""
    state = states[65]
    _, logits = sc.step(tiny.backend, tiny.params, state, [65, 66])
    for plane in ("conv", "hidden", "key", "value", "ring_key", "ring_value"):
        changed = state | {plane: state[plane] + 1.0}
        _, other = sc.step(tiny.backend, tiny.params, changed, [65, 66])
        assert np.abs(np.array(other) - np.array(logits)).max() > 1e-4, plane


def test_law_5_refusals_change_nothing(tiny, states):
    backend, params, state = tiny.backend, tiny.params, states[131]
    before = host(state)
    for error, call in (
        (sc.GeometryError, lambda: sc.step(backend, params, state, [65, 256])),
        (sc.CapacityError, lambda: sc.extend(backend, params, state, TEXT[:, :30])),
        (sc.RollbackError, lambda: sc.verify(backend, params, states[3], np.ones((2, 34), int))),
        (sc.GeometryError, lambda: sc.take_rows(backend, state, [2])),
    ):
        with pytest.raises(error):
            call()
    assert_bits(before, state)


def test_two_loads_are_two_identities(tiny):
    twin = sc.load("tiny-hybrid")
    assert twin.identity != tiny.identity
    runtime = sc.Runtime(tiny, capacity=CAPACITY)
    slot = sc.Runtime(twin, capacity=CAPACITY).capture()
    with pytest.raises(sc.IdentityError, match="another load"):
        runtime.exchange(slot)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    from statecore.models import load_weights, save_weights

    like = {"a": jnp.zeros(3), "b": {"c": jnp.zeros((2, 2))}}
    save_weights(tmp_path / "w.safetensors", {"a": jnp.zeros(4), "d": jnp.zeros(1)})
    with pytest.raises(sc.LoadError) as refusal:
        load_weights(tmp_path / "w.safetensors", like)
    for words in ("b.c is missing", "d is unexpected", "a is [4]"):
        assert words in str(refusal.value)
    save_weights(tmp_path / "w.safetensors", like)
    assert jax.tree.structure(load_weights(tmp_path / "w.safetensors", like)) == jax.tree.structure(like)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_gives_the_same_text(tiny, temperature):
    """Batch of two with different prompts; `lossless` verifies with single steps."""
    prompts = ["ROMEO.\nIt is the east, it is the east, it is ", "JULIET.\nO Romeo, Romeo, "]
    texts = []
    for draft in (None, sc.NGramDraft(num_draft=WIDTH - 1)):
        runtime = sc.Runtime(tiny, batch=2, capacity=CAPACITY)
        sampler = sc.Sampler(temperature=temperature)
        gen = sc.Generation(runtime, prompts, sampler=sampler, max_tokens=40, lossless=True)
        gen.run(40, speculate=draft)
        texts.append(gen.text)
    assert texts[0] == texts[1]
    assert gen.speculation.num_drafted > 0

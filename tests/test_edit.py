"""Looking at and editing states: names of parts, diff, patch, interpolate, marks, gradients."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import CAPACITY, CASE_NAMES, assert_bits, cases, host, refuses
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore import planes as pl
from statecore import ssm
from statecore.models import LanguageModel, TinyHybridConfig, decoder_backend, plain_params, tiny_hybrid
from statecore.state import diff, interpolate, is_marked, mark, patch

ROOT = Path(__file__).parent.parent
LAYERS = (1, 4)  # of the stacked state below, in this order


def stacked_planes():
    """Planes of every kind, stacked on three different axes."""
    return {
        "h": pl.recurrent(batch_axis=1, layer_axis=0, layers=LAYERS),
        "kv": pl.append(axis=1, layer_axis=-2, layers=LAYERS),
        "ring": pl.sliding(axis=2, size=3, layer_axis=1, layers=LAYERS),
        "odd": pl.constant(),
        "pos": pl.position(),
    }


def stacked_state(lengths=(6, 2), seed=0, rows=8):
    """A state of two sequences full of different numbers, also where nothing can be read."""
    make = np.random.default_rng(seed).normal
    return {
        "h": jnp.array(make(size=(2, 2, 3)), jnp.float32),
        "kv": jnp.array(make(size=(2, rows, 2, 2)), jnp.bfloat16),
        "ring": jnp.array(make(size=(2, 2, 5)), jnp.float32),
        "odd": jnp.array([1, 2], jnp.int32),
        "pos": jnp.array(lengths, jnp.int32),
    }


@pytest.fixture(scope="module")
def read(tiny):
    """A state of the embedded model that has read two texts."""
    state = tiny.backend.init(tiny.params, batch=2, capacity=CAPACITY)
    return sc.extend(tiny.backend, tiny.params, state, [list(b"Good morrow"), list(b"Good even..")])[0]


# Names.


def test_layers_are_named_by_their_number(tiny, read):
    hidden = patch(read, "layers.3.hidden", jnp.zeros_like, planes=tiny.backend)["hidden"]
    assert not hidden[2].any() and hidden[3].any() and hidden[1].any()
    assert (patch(read, "hidden[2]", jnp.zeros_like, planes=tiny.backend)["hidden"] == hidden).all()
    shapes = []
    for name in ("hidden", "layers.3.hidden", "layers.1.ring_key", "layers.4.key"):
        patch(read, name, lambda part: shapes.append(part.shape) or part, planes=tiny.backend)
    assert shapes == [(4, 2, 12, 32, 32), (2, 12, 32, 32), (2, 96, 2, 32), (2, CAPACITY, 2, 32)]


@pytest.mark.parametrize("name", ["layers.4.h", "layers.4.kv", "layers.4.ring"])
def test_layers_on_any_axis(name):
    state, planes = stacked_state(), stacked_planes()
    seen = []
    new = patch(state, name, lambda part: seen.append(part) or part * 2, planes=planes)
    plane = name.rpartition(".")[2]
    axis = {"h": 0, "kv": 2, "ring": 1}[plane]
    assert (seen[0] == jnp.take(state[plane], 1, axis=axis)).all()
    assert (jnp.take(new[plane], 1, axis=axis) == seen[0] * 2).all()
    assert (jnp.take(new[plane], 0, axis=axis) == jnp.take(state[plane], 0, axis=axis)).all()


def test_a_path_of_the_state_itself_is_a_name():
    planes = {"layers": [{"h": pl.recurrent()}, {"h": pl.recurrent()}], "pos": pl.position()}
    state = {"layers": [{"h": jnp.ones((1, 2))}, {"h": jnp.ones((1, 2))}], "pos": jnp.zeros(1, jnp.int32)}
    new = patch(state, "layers.1.h", jnp.zeros_like, planes=planes)
    assert not new["layers"][1]["h"].any() and new["layers"][0]["h"].all()


def test_a_name_of_two_things_is_refused():
    planes = {"layers.1.h": pl.recurrent(), "h": pl.recurrent(layer_axis=1, layers=(0, 1)), "pos": pl.position()}
    state = {"layers.1.h": jnp.ones((1, 2)), "h": jnp.ones((1, 2)), "pos": jnp.zeros(1, jnp.int32)}
    refuses(sc.GeometryError, lambda: patch(state, "layers.1.h", jnp.copy, planes=planes), state, "two parts")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hiden", ["hiden", "`hidden`", "misspelled"]),
        ("layers.1.hidden", ["[0, 2, 3, 5]", "`layers.3.hidden`"]),
        ("hidden[4]", ["[0, 2, 3, 5]", "`layers.5.hidden`"]),
        ("layers.3.position", ["not stacked"]),
        ("", ["no plane"]),
    ],
)
def test_unknown_names_are_refused_with_the_near_ones(tiny, read, name, words):
    refuses(sc.GeometryError, lambda: patch(read, name, jnp.copy, planes=tiny.backend), read, *words)


def test_layers_need_planes(read):
    refuses(sc.GeometryError, lambda: patch(read, "layers.3.hidden", jnp.copy), read, "planes=")


@pytest.mark.parametrize(
    ("plane", "words"),
    [
        (pl.recurrent(layer_axis=1, layers=(0, 1)), ["3 layers", "names 2"]),
        (pl.recurrent(layer_axis=1, layers=(0, 1, 1)), ["twice"]),
        (pl.recurrent(layer_axis=1, layers=(0, 1, -1)), ["whole numbers"]),
        (pl.recurrent(layer_axis=5, layers=(0, 1, 2)), ["layer_axis is 5"]),
        (pl.recurrent(layer_axis=1), ["layer_axis but not layers"]),
        (pl.recurrent(layers=(0, 1, 2)), ["layers but not layer_axis"]),
        (pl.recurrent(layer_axis=0, layers=(0, 1)), ["sequences or rows"]),
        (pl.append(axis=1, layer_axis=-2, layers=(0, 1, 2)), ["sequences or rows"]),
    ],
)
def test_layers_that_do_not_fit_are_refused(plane, words):
    def init(params, batch, capacity):
        return {"h": jnp.zeros((batch, 3, 4)), "pos": jnp.zeros(batch, jnp.int32)}

    def step(params, state, tokens):
        return state | {"pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 4))

    backend = sc.Backend(init=init, step=step, planes={"h": plane, "pos": pl.position()})
    with pytest.raises(sc.GeometryError) as refused:
        backend.geometry(None, batch=2, capacity=4)
    for word in ("`h`", *words):
        assert word in str(refused.value)


def test_planes_with_layers_hash_and_compare():
    assert len({pl.shift(axis=1, layer_axis=0, layers=[0, 1]), pl.shift(axis=1, layer_axis=0, layers=(0, 1))}) == 1
    assert pl.recurrent() != pl.recurrent(layer_axis=1, layers=(0,))


# Patch.


@given(st.integers(0, 2**31), st.sampled_from(["h", "layers.1.h", "kv", "layers.4.kv", "layers.1.ring", "odd"]))
def test_a_patch_and_its_inverse_give_the_original(mask, name):
    """Flipping bits twice is exact, whatever they mean."""

    def flip(part):
        word = {4: jnp.uint32, 2: jnp.uint16}[part.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(part, word) ^ jnp.array(mask % 2 ** (8 * part.dtype.itemsize), word)
        return jax.lax.bitcast_convert_type(bits, part.dtype)

    state, planes = stacked_state(), stacked_planes()
    before = host(state)
    once = patch(state, name, flip, planes=planes)
    assert_bits(before, patch(once, name, flip, planes=planes))
    assert_bits(before, state)


def test_a_patch_shares_no_buffer(tiny, read):
    before = host(read)
    new = patch(read, "hidden", lambda part: part, planes=tiny.backend)
    sc.step(tiny.backend, tiny.params, new, [1, 2], donate=True)
    assert_bits(before, read)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda part: part[:1], ["float32[1,12,32,32]", "float32[2,12,32,32]"]),
        (lambda part: part.astype(jnp.bfloat16), ["bfloat16"]),
        (lambda part: 1.0, ["1.0"]),
        (lambda part: None, ["None"]),
    ],
)
def test_a_patch_keeps_shape_and_dtype(tiny, read, fn, words):
    refuses(sc.GeometryError, lambda: patch(read, "layers.3.hidden", fn, planes=tiny.backend), read, *words)


def test_the_position_is_not_patched(tiny, read):
    for planes in (tiny.backend, tiny.geometry(batch=2, capacity=CAPACITY), tiny.backend.planes, None):
        refuses(sc.UnsupportedError, lambda p=planes: patch(read, "position", jnp.copy, planes=p), read, "take_rows")


def test_a_patch_of_a_donated_state_is_refused(tiny, read):
    gone = sc.capture(read)
    sc.step(tiny.backend, tiny.params, gone, [1, 2], donate=True)
    with pytest.raises(sc.StateConsumedError, match="conv"):
        patch(gone, "hidden", jnp.copy, planes=tiny.backend)


def test_a_patch_inside_a_trace(tiny, read):
    def energy(scale):
        new = patch(read, "layers.3.hidden", lambda part: part * scale, planes=tiny.backend)
        return (new["hidden"] ** 2).sum()

    two = jax.jit(energy)(2.0)
    expected = energy(2.0)
    np.testing.assert_allclose(two, expected, rtol=1e-5)
    slope = jax.grad(energy)(2.0)
    np.testing.assert_allclose(slope, (expected - energy(0.0)) * 2 / 2.0, rtol=1e-4)


def test_a_weak_type_does_not_stay():
    state = stacked_state()
    new = patch(state, "h", lambda part: jnp.full(part.shape, 1.0), planes=stacked_planes())
    assert new["h"].dtype == jnp.float32 and not new["h"].weak_type


# Diff.


@pytest.mark.parametrize("name", CASE_NAMES)
@given(data=st.data())
def test_a_diff_is_empty_exactly_if_equal(name, data):
    case = cases()[name]
    lengths, others = (data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)) for _ in range(2))
    seeds = data.draw(st.sampled_from([(0, 0), (0, 1)]))
    a, b = (case.state(length=length, seed=seed) for length, seed in zip((lengths, others), seeds, strict=True))
    found = diff(a, b, planes=case.backend)
    assert (not found) == sc.equal(case.backend, a, b)
    assert {part.name for part in found} <= set(sc.differing_planes(case.backend, a, b))
    if lengths == others:
        assert {part.name for part in found} == set(sc.differing_planes(case.backend, a, b))


@given(
    name=st.sampled_from(["h", "kv", "ring"]),
    sequence=st.integers(0, 1),
    place=st.integers(0, 1),
    row=st.integers(0, 4),
)
def test_a_diff_finds_the_one_element(name, sequence, place, row):
    """Sequence 0 holds 6 tokens and reads ring rows of tokens 4 and 5; sequence 1 holds 2."""
    index = {"h": (place, sequence, row % 3), "kv": (sequence, row, place, 1), "ring": (sequence, place, row)}[name]
    state = stacked_state()
    other = state | {name: state[name].at[index].add(1)}
    tokens = {0: {4: 4, 0: 5}, 1: {0: 0, 1: 1}}[sequence]
    is_read = {"h": True, "kv": row < (6, 2)[sequence], "ring": row in tokens}[name]
    found = diff(state, other, planes=stacked_planes())
    assert len(found) == is_read
    for part in found:
        assert part.name == f"layers.{LAYERS[place]}.{name}" and part.num_differing == 1
        assert part.index == index and part.sequence == sequence
        assert part.token == {"h": None, "kv": row, "ring": tokens.get(row)}[name]
        assert part.max_difference == pytest.approx(1, rel=0.02)


@given(lengths=st.lists(st.integers(0, 8), min_size=2, max_size=2), flipped=st.booleans())
def test_a_diff_of_other_lengths_compares_what_both_can_read(lengths, flipped):
    """Two sequences fed the same, to other lengths, in rings of other sizes: only the position differs."""

    def fed(length, rows):
        ring = np.full((1, rows), -1.0, np.float32)
        for token in range(length):
            ring[0, token % rows] = token
        kv = np.where(np.arange(8) < length, np.arange(8), 99)[None].astype(np.float32)
        return {"ring": jnp.array(ring), "kv": jnp.array(kv), "pos": jnp.array([length], jnp.int32)}

    planes = {"ring": pl.sliding(axis=1, size=4), "kv": pl.append(axis=1), "pos": pl.position()}
    states = [fed(length, rows) for length, rows in zip(lengths, (5, 7), strict=True)]
    found = diff(*(states[::-1] if flipped else states), planes=planes)
    assert {part.name for part in found} == ({"pos"} if lengths[0] != lengths[1] else set())
    compared = {part.name: part.num_compared for part in found.parts}
    assert compared["kv"] == min(lengths)
    assert compared["ring"] == max(0, min(min(lengths), 3 - abs(lengths[0] - lengths[1])))


def test_a_diff_reads_bits():
    planes = {"h": pl.recurrent(), "key": pl.recurrent(), "z": pl.recurrent(), "pos": pl.position()}
    state = {
        "h": jnp.array([0.0, jnp.nan, 1.0, jnp.inf]),
        "key": jax.random.split(jax.random.key(0), 4),
        "z": jnp.zeros(4, jnp.complex64),
        "pos": jnp.zeros(4, jnp.int32),
    }
    assert not diff(state, jax.tree.map(jnp.copy, state), planes=planes)
    zero = diff(state, state | {"h": state["h"].at[0].set(-0.0)}, planes=planes)
    assert [(part.index, part.max_difference) for part in zero] == [((0,), 0.0)]
    gone = diff(state, state | {"h": state["h"].at[2].set(jnp.nan)}, planes=planes)
    assert np.isnan(next(iter(gone)).max_difference)
    keys = diff(state, state | {"key": jax.random.split(jax.random.key(1), 4)}, planes=planes)
    assert [(part.num_differing, part.max_difference) for part in keys] == [(4, None)]
    z = diff(state, state | {"z": state["z"].at[3].set(3 + 4j)}, planes=planes)
    assert [(part.index, part.max_difference, part.num_differing) for part in z] == [((3,), 5.0, 1)]


def test_a_diff_of_another_geometry_is_refused(tiny, read):
    other = tiny.backend.init(tiny.params, batch=1, capacity=CAPACITY)
    words = ["`hidden`", "`position`", "float32[4,2,12,32,32]", "float32[4,1,12,32,32]"]
    refuses(sc.GeometryError, lambda: diff(read, other, planes=tiny.backend), read, *words)
    refuses(sc.GeometryError, lambda: diff(read, {"h": 1}, planes=tiny.backend), read, "hidden")
    with pytest.raises(sc.UnsupportedError, match="host"):
        jax.jit(lambda a: bool(diff(a, a, planes=tiny.backend)))(read)


def test_a_diff_as_text(tiny, read):
    other = patch(read, "layers.3.hidden", lambda part: part.at[1, 0, 0, 7].add(0.5), planes=tiny.backend)
    text = str(diff(read, other, planes=tiny.backend))
    for words in ("layers.3.hidden", "recurrent", "0.5", "sequence 1, [2, 1, 0, 0, 7]"):
        assert words in text
    assert len(text.splitlines()) == 2
    assert "No bit" in str(diff(read, read, planes=tiny.backend))


# Interpolate.


@given(seed=st.integers(0, 9), weights=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2))
def test_interpolating_to_an_end_has_its_bits(seed, weights):
    planes = stacked_planes() | {"w": pl.shift(axis=1)}
    a, b = (stacked_state(seed=s) for s in (seed, seed + 1))
    edge = jnp.array([[0.0, jnp.inf, jnp.nan, 1e38], [-0.0, 2.0, -jnp.inf, 0.1]])
    a, b = a | {"w": edge}, b | {"w": edge[::-1] * 3}
    mixed = interpolate(a, b, np.array(weights), planes=planes, attention=True)
    for sequence, weight in enumerate(weights):
        end = (a, b)[int(weight)]
        for name, axis in (("h", 1), ("w", 0), ("kv", 0), ("ring", 0)):
            left, right = (np.take(np.array(state[name]), sequence, axis=axis) for state in (mixed, end))
            assert left.tobytes() == right.tobytes(), name
    if len(set(weights)) == 1:
        assert not diff(mixed, (a, b)[int(weights[0])], planes=planes)


@given(weight=st.floats(0, 1), length=st.integers(0, 6))
def test_interpolating_is_a_line(weight, length):
    planes = stacked_planes()
    a = stacked_state((length, length))
    b = a | {"h": stacked_state(seed=1)["h"]}
    mixed = interpolate(a, b, weight, planes=planes)
    expected = (1 - weight) * np.array(a["h"], np.float64) + weight * np.array(b["h"], np.float64)
    np.testing.assert_allclose(mixed["h"], expected, atol=1e-6)
    assert {part.name for part in diff(a, mixed, planes=planes)} <= {"layers.1.h", "layers.4.h"}
    assert not diff(a, interpolate(a, a, weight, planes=planes), planes=planes)


def test_what_is_not_mixed_must_be_equal():
    planes, a = stacked_planes(), stacked_state()
    b = stacked_state(seed=1)

    def mix(other, **options):
        return lambda: interpolate(a, other, 0.5, planes=planes, **options)

    refuses(sc.GeometryError, mix(b), a, "`kv`", "`ring`", "attention=True")
    assert mix(b, attention=True)()["kv"].dtype == jnp.bfloat16
    refuses(sc.GeometryError, mix(a | {"odd": b["odd"] + 1}, attention=True), a, "`odd`")
    refuses(sc.GeometryError, mix(stacked_state((6, 3))), a, "numbers of tokens")
    refuses(sc.GeometryError, mix(stacked_state(rows=9), attention=True), a, "`kv`", "[2,9,2,2]")
    unread = a | {"kv": a["kv"].at[1, 2:].set(7), "ring": a["ring"].at[0, :, 2].set(7)}
    assert not diff(a, mix(unread)(), planes=planes)  # what cannot be read may differ


@pytest.mark.parametrize("weight", [-0.01, 1.01, float("nan"), [0.5, 2.0]])
def test_weights_outside_are_refused(weight):
    a = stacked_state()
    refuses(sc.UnsupportedError, lambda: interpolate(a, a, weight, planes=stacked_planes()), a, "between 0 and 1")


def test_bad_mixtures_are_refused():
    a, planes = stacked_state(), stacked_planes()
    refuses(sc.GeometryError, lambda: interpolate(a, a, [0.5] * 3, planes=planes), a, "shape [3]")
    case = cases()["digit"]  # its recurrent plane holds integers
    state = case.state()
    refuses(sc.UnsupportedError, lambda: interpolate(state, state, 0.5, planes=case.backend), state, "floating")


def test_interpolate_inside_a_trace():
    planes, a = stacked_planes(), stacked_state()
    b = a | {"h": stacked_state(seed=1)["h"]}
    run = jax.jit(lambda a, b, weight: interpolate(a, b, weight, planes=planes))
    assert not diff(run(a, b, 0.25), interpolate(a, b, 0.25, planes=planes), planes=planes)
    for other, weight in ((b, 1.5), (a | {"odd": a["odd"] + 1}, 0.5)):
        refused = run(a, other, weight)
        assert (refused["pos"] == ~a["pos"]).all()
        assert not diff(a, refused | {"pos": a["pos"]}, planes=planes)
    for weight in (0.0, 0.5, 1.0):  # the line's slope, at its ends too
        slope = jax.grad(lambda w: interpolate(a, b, w, planes=planes)["h"].sum())(weight)
        np.testing.assert_allclose(slope, (b["h"] - a["h"]).sum(), rtol=1e-5)


# Marks.


def start(name="decay", *, ring_slots=3, length=0):
    case = cases()[name]
    state = case.backend.init(case.params, batch=2, capacity=CAPACITY)
    seq = ssm.begin(case.backend, state, ring_slots=ring_slots)
    return case, ssm.extend(case.params, seq, [[1, 2, 3], [3, 2, 1]])[0]


def cache_for(case):
    return sc.PrefixCache(case.backend, case.params, capacity=CAPACITY, block_size=1, interval=1)


def test_marks_go_with_their_arrays():
    array = jnp.ones(3)
    mark({"x": array})
    assert is_marked([array]) and not is_marked([jnp.copy(array)])
    del array
    assert not any(is_marked(jnp.ones(3)) for _ in range(50))


def test_patched_values_are_marked():
    state, planes = stacked_state(), stacked_planes()
    new = patch(state, "h", jnp.copy, planes=planes)
    assert is_marked(new) and not is_marked(state)
    assert is_marked(patch(new, "kv", jnp.copy, planes=planes)["h"])
    assert is_marked(interpolate(state, state, 0.5, planes=planes))
    assert not is_marked(jax.jit(lambda s: patch(s, "h", jnp.copy, planes=planes))(state))


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize("path", ["h", "history"])
def test_a_patched_sequence_stays_marked(name, path):
    case, seq = start(name)
    if path not in case.backend.layout.paths:
        pytest.skip("no such plane")
    assert not seq.is_patched
    seq = ssm.patch(seq, path, lambda part: part + 1)
    seq = ssm.checkpoint(ssm.save_ring(seq))
    steps = [
        lambda s: ssm.step(case.params, s, [1, 2])[0],
        lambda s: ssm.extend(case.params, s, [[1, 2], [3, 4]], num_valid=[2, 0])[0],
        lambda s: ssm.rollback(ssm.verify(case.params, ssm.checkpoint(s), [[1, 2], [3, 4]])[0], [0, 1]),
        lambda s: ssm.commit_accepted_prefix(ssm.verify(case.params, s, [[1, 2], [3, 4]])[0], [1, 2], 2),
        lambda s: ssm.take_rows(s, [1, 0, 1]),
        lambda s: ssm.rollback(s, 0),
        lambda s: ssm.restore_ring(s, 0),
        lambda s: ssm.sync(ssm.start_checkpoint(s)),
        lambda s: ssm.begin(case.backend, s.state, tokens=s.tokens),
    ]
    for run in steps:
        after = run(seq)
        assert after.is_patched and is_marked(after.state)
        refuses(sc.IdentityError, lambda s=after: ssm.marconi_checkpoint(s, cache_for(case)), after.state, f"`{path}`")
        cache = cache_for(case)
        refuses(sc.IdentityError, lambda s=after, c=cache: c.insert(s.state, s.tokens[0], 0), after.state, "patched")
        assert len(cache) == 0


@pytest.mark.parametrize("back", [lambda s: ssm.rollback(s, 0), lambda s: ssm.restore_ring(s, 0)])
def test_going_back_before_a_patch_takes_it_back(back):
    case, clean = start()
    clean = ssm.checkpoint(ssm.save_ring(clean))
    seq = ssm.step(case.params, ssm.patch(clean, "h", lambda part: part + 1), [1, 2])[0]
    gone = back(seq)
    assert seq.is_patched and not gone.is_patched and not is_marked(gone.state)
    assert sc.equal(case.backend, gone.state, clean.state)
    cache = cache_for(case)
    ssm.marconi_checkpoint(gone, cache)
    assert len(cache) == 2
    refuses(sc.IdentityError, lambda: cache.insert(seq.state, seq.tokens[0], 0), seq.state, "patched")


@pytest.mark.parametrize("back", [lambda s: ssm.rollback(s, 0), lambda s: ssm.restore_ring(s, 0)])
def test_a_patch_of_rows_is_not_taken_back(back):
    """A checkpoint goes back by length, and rows below it stay as the patch left them."""
    case, clean = start()
    clean = ssm.checkpoint(ssm.save_ring(clean))
    seq = ssm.patch(clean, "history", lambda part: part.at[0, 0].add(1))
    gone = back(ssm.step(case.params, seq, [1, 2])[0])
    assert gone.is_patched and is_marked(gone.state)
    assert not sc.equal(case.backend, gone.state, clean.state)


def test_a_patch_while_a_window_is_open_is_refused():
    case, seq = start()
    opened, _ = ssm.verify(case.params, seq, [[1, 2], [3, 4]])
    refuses(sc.LifecycleError, lambda: ssm.patch(opened, "h", jnp.copy), opened.state, "open")


def test_an_unmarked_state_enters_a_cache_and_a_marked_one_does_not():
    case = cases()["decay"]
    state = case.state(length=2)
    tokens = np.random.default_rng(0).integers(0, case.vocab_size, (2, 12))[:, :2]
    cache = cache_for(case)
    new = patch(state, "h", jnp.copy, planes=case.backend)
    assert cache.insert(state, tokens[0], 0)
    for donate in (False, True):
        restored = cache.restore(sc.capture(state), 0, cache.lookup([*tokens[0], 0]), donate=donate)
        assert not is_marked(restored)
        # The other sequence of a patched state is patched still.
        patched = patch(new, "h", jnp.copy, planes=case.backend)
        restored = cache.restore(patched, 0, cache.lookup([*tokens[0], 0]), donate=donate)
        refuses(sc.IdentityError, lambda r=restored: cache.insert(r, tokens[1], 1), restored, "`h`")
    refuses(sc.IdentityError, lambda: cache.insert(new, tokens[1], 1), new, "`h`", "patched")
    assert len(cache) == 1


# Gradients.


def loss_of(backend, params, state, path, tokens, mode):
    """Returns a function of a plane that feeds, verifies and commits, and reads state and logits."""

    def loss(plane):
        new = patch(state, path, lambda _: plane, planes=backend)
        new, first = sc.extend(backend, params, new, tokens[:, :3], num_valid=np.array([3, 2]))
        window = sc.verify(backend, params, new, tokens[:, 3:6], mode=mode)
        kept = sc.commit(backend, window, np.array([1, 3]))
        _, last = sc.step(backend, params, kept, tokens[:, 6])
        logits = jnp.concatenate([first[:, :2], window.logits, last[:, None]], axis=1)
        return jnp.sin(logits).mean() + 0.1 * jnp.tanh(kept[path]).mean()

    return loss


def check_slope(loss, plane, epsilon, tolerance):
    """Compares the slope along a random direction with a central difference."""
    direction = jax.random.normal(jax.random.key(0), plane.shape)
    direction /= jnp.linalg.norm(direction)
    both = jax.jit(jax.value_and_grad(loss))  # one function to compile, whose value is all the rest needs
    gradient = both(plane)[1]
    assert np.isfinite(gradient).all() and np.array(gradient).any()
    # Along the gradient itself, where the slope is greatest, and along a direction of no meaning.
    for along in (gradient / jnp.linalg.norm(gradient), direction):
        ahead, behind = (float(both(plane + sign * epsilon * along)[0]) for sign in (1, -1))
        slope = (ahead - behind) / (2 * epsilon)
        expected = float(jnp.vdot(gradient, along))
        assert abs(slope - expected) <= tolerance * float(jnp.linalg.norm(gradient))


@pytest.mark.parametrize(("name", "mode"), [("decay", "exact"), ("decay-own", "exact"), ("decay-own", "fast")])
def test_gradients_flow_through_transitions(name, mode):
    case = cases()[name]
    tokens = np.random.default_rng(3).integers(0, 4, (2, 7))
    loss = loss_of(case.backend, case.params, case.state(length=2), "h", tokens, mode)
    check_slope(loss, case.state(length=2)["h"], 1e-2, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_flow_through_the_embedded_model(tiny, read, mode):
    tokens = np.array([list(b" my lor"), list(b". Speak")])
    loss = loss_of(tiny.backend, tiny.params, read, "hidden", tokens, mode)
    check_slope(loss, read["hidden"], 3e-2, 1e-2)


@pytest.mark.slow
def test_gradients_flow_through_a_small_hybrid():
    """The embedded model's own functions at other sizes, which compile in seconds."""
    config = TinyHybridConfig(
        vocab_size=16, width=8, layers="MSA", mlp_width=8, ring_rows=12, window=4, mamba_heads=2,
        mamba_head_size=4, state_size=4, num_heads=2, num_kv_heads=1, head_size=4,
    )  # fmt: skip
    decoder = tiny_hybrid(config)
    params = plain_params(LanguageModel(decoder, rngs=nnx.Rngs(0)))
    backend = decoder_backend(decoder)
    state = backend.init(params, batch=2, capacity=16)
    tokens = np.random.default_rng(0).integers(0, 16, (2, 9))
    state, _ = sc.extend(backend, params, state, tokens[:, :2])
    loss = loss_of(backend, params, state, "hidden", tokens[:, 2:], "fast")
    # Untrained, the state is of norm 0.003 and its norm is divided by: a longer step leaves the straight line.
    check_slope(loss, state["hidden"], 1e-3, 1e-2)


@pytest.mark.slow
def test_example_state_tuning(capsys):
    main = runpy.run_path(str(ROOT / "examples" / "state_tuning.py"))["main"]
    before, after = main(["--prompt", "O", "--target", "x!", "--steps", "4", "--tokens", "3"])
    printed = capsys.readouterr().out
    assert after < before and f"{before:.3f}" in printed and f"{after:.3f}" in printed


def ends(dtype, a, b):
    """Two states of one floating plane, and its planes."""
    planes = {"h": pl.recurrent(), "pos": pl.position()}
    made = [{"h": jnp.asarray(values, dtype).reshape(1, -1), "pos": jnp.zeros(1, jnp.int32)} for values in (a, b)]
    return *made, planes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_mixture_of_finite_states_is_finite(dtype):
    """The difference of the largest numbers does not fit their dtype; the mixture does, and its derivative."""
    most = float(jnp.finfo(dtype).max)
    a, b, planes = ends(dtype, [most, -most, most], [-most, most, most])
    mixed = interpolate(a, b, 0.5, planes=planes)["h"]
    np.testing.assert_array_equal(np.array(mixed, np.float32), np.array([[0, 0, most]], np.float32))
    a, b, planes = ends("float16", [40000.0], [-40000.0])
    total = lambda w: interpolate(a, b, w, planes=planes)["h"].astype(jnp.float32).sum()  # noqa: E731
    assert np.isfinite(jax.jvp(total, (jnp.float32(0.5),), (jnp.float32(0.5),))[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_mixture_has_the_same_bits_inside_a_jit(dtype):
    draw = np.random.default_rng(0).normal
    a, b, planes = ends(dtype, draw(size=4000) * 30, draw(size=4000))
    eager = interpolate(a, b, 0.3, planes=planes)
    traced = jax.jit(lambda a, b: interpolate(a, b, 0.3, planes=planes))(a, b)
    assert_bits(host(eager), traced)
    wide = np.array(a["h"], np.float64) + 0.3 * (np.array(b["h"], np.float64) - np.array(a["h"], np.float64))
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.array(eager["h"], np.float64), wide, rtol=step, atol=30 * 2.0**-23)


def test_weights_of_double_planes_are_double():
    with jax.enable_x64(True):
        a, b, planes = ends("float64", [0.0], [1.0])
        assert float(interpolate(a, b, 0.1, planes=planes)["h"][0, 0]) == 0.1
    a, b, planes = ends("float32", [0.0], [1.0])
    with pytest.raises(sc.UnsupportedError, match="complex"):
        interpolate(a, b, 0.5 + 0j, planes=planes)


def test_a_patch_donates_nothing_whatever_its_function_does():
    """A function that donates its argument is given a copy."""
    state, planes = stacked_state(), stacked_planes()
    before = host(state)
    new = patch(state, "odd", jax.jit(lambda part: part + 1, donate_argnums=0), planes=planes)
    assert new["odd"].tolist() == [2, 3]
    assert_bits(before, state)


def test_arrays_of_numpy_are_never_narrowed():
    """Capture, compact capture and patch refuse what JAX would cut to 32 bits, by its path."""
    state = {"h": np.array([2**40 + 5]), "pos": jnp.zeros(1, jnp.int32)}
    planes = {"h": pl.recurrent(), "pos": pl.position()}
    for call in (lambda: sc.capture(state), lambda: patch(state, "h", lambda part: part, planes=planes)):
        with pytest.raises(sc.GeometryError, match="`h` is an array of NumPy in int64"):
            call()
    kept = sc.capture({"h": np.array([3], np.int32), "x": np.float32(2)})
    assert kept["h"].tolist() == [3] and float(kept["x"]) == 2

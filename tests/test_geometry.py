"""Planes, geometries, backends and the registry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases

import statecore as sc
from statecore import planes as pl
from statecore import testing


def backend_of(planes, state):
    return sc.Backend(
        init=lambda params, batch, capacity: jax.tree.map(lambda make: make(batch, capacity), state),
        step=lambda params, state, tokens: (state, jnp.zeros((tokens.shape[0], 3))),
        planes=planes,
        name="made up",
    )


def ints(*shape):
    return lambda batch, capacity: jnp.zeros((batch, *shape), jnp.int32)


def test_kinds():
    kinds = [
        pl.position(),
        pl.append(axis=1),
        pl.sliding(axis=1, size=4),
        pl.shift(axis=1),
        pl.recurrent(),
        pl.constant(),
        pl.opaque(),
    ]
    assert [plane.kind for plane in kinds] == [
        "position",
        "append",
        "sliding",
        "shift",
        "recurrent",
        "constant",
        "opaque",
    ]
    assert len({plane.undone_by for plane in kinds}) == 7


def test_a_geometry_is_hashable_and_free_of_arrays():
    backend = cases()["digit"].backend
    geometry = backend.geometry(None, batch=2, capacity=16)
    again = testing.digit_backend().geometry(None, batch=2, capacity=16)
    assert geometry == again and hash(geometry) == hash(again)
    assert not [leaf for leaf in jax.tree.leaves(vars(geometry)) if isinstance(leaf, jax.Array)]
    assert jax.tree.structure(geometry.struct()) == backend.layout.treedef
    text = str(geometry)
    for path in ("h", "conv", "kv", "ring", "pos"):
        assert path in text
    assert "absent" not in text


def test_geometries_differ_by_plane_path():
    backend = cases()["digit"].backend
    small, large = (backend.geometry(None, batch=2, capacity=size) for size in (16, 32))
    (difference,) = small.differences(large)
    assert "`kv`" in difference and "int32[2,32]" in difference
    assert small.differences(small) == []
    other = cases()["decay"].backend.geometry(testing.decay_params(), batch=2, capacity=16)
    assert any("`history` is unexpected" in line for line in small.differences(other))


@pytest.mark.parametrize(
    ("planes", "state", "words"),
    [
        ({"h": pl.recurrent()}, {"h": ints()}, "0 (none)"),
        ({"a": pl.position(), "b": pl.position()}, {"a": ints(), "b": ints()}, "2 (a, b)"),
        ({"h": 3, "pos": pl.position()}, {"h": ints(), "pos": ints()}, "`h`"),
    ],
)
def test_planes_without_one_position_are_refused(planes, state, words):
    with pytest.raises(sc.GeometryError) as refusal:
        backend_of(planes, state)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("planes", "state", "words"),
    [
        ({"h": pl.recurrent(), "pos": pl.position()}, {"pos": ints()}, "missing ['h']"),
        ({"pos": pl.position()}, {"h": ints(), "pos": ints()}, "unexpected ['h']"),
        ({"h": None, "pos": pl.position()}, {"h": ints(), "pos": ints()}, "unexpected ['h']"),
        ({"kv": pl.append(axis=2), "pos": pl.position()}, {"kv": ints(4), "pos": ints()}, "`kv` has 2 axes"),
        ({"kv": pl.append(axis=0), "pos": pl.position()}, {"kv": ints(4), "pos": ints()}, "both"),
        ({"h": pl.recurrent(batch_axis=1), "pos": pl.position()}, {"h": ints(5), "pos": ints()}, "batch of 2"),
        ({"r": pl.sliding(axis=1, size=9), "pos": pl.position()}, {"r": ints(4), "pos": ints()}, "window of 9"),
        ({"pos": pl.position()}, {"pos": ints(1)}, "position is int32[2]"),
    ],
)
def test_planes_that_do_not_mirror_the_state_are_refused(planes, state, words):
    with pytest.raises(sc.GeometryError) as refusal:
        backend_of(planes, state).geometry(None, batch=2, capacity=8)
    assert words in str(refusal.value)


def test_functions_that_do_not_suffice_are_refused():
    functions = cases()["digit-own"].backend.functions
    planes = {"pos": pl.position()}
    for given in ({}, {"verify": functions.verify}, {"replay": functions.replay, "step": functions.step}):
        with pytest.raises(sc.UnsupportedError):
            sc.Backend(init=functions.init, planes=planes, **given)
    with pytest.raises(sc.GeometryError):
        cases()["digit"].backend.init(None, batch=0, capacity=4)


def test_validate_names_every_mismatch():
    backend = cases()["digit"].backend
    geometry = backend.geometry(None, batch=2, capacity=16)
    state = backend.init(None, batch=2, capacity=16)
    sc.validate(geometry, state)
    wrong = state | {"h": state["h"].astype(jnp.int16), "kv": state["kv"][:, :8], "new": state["h"]}
    del wrong["conv"]
    with pytest.raises(sc.GeometryError) as refusal:
        sc.validate(geometry, wrong)
    for words in ("`h` is int16[2]", "`kv` is int32[2,8]", "`conv` is missing", "`new` is unexpected"):
        assert words in str(refusal.value)
    sc.step(backend, None, state, [1, 2], donate=True)
    with pytest.raises(sc.StateConsumedError, match="`conv`"):
        sc.validate(geometry, state)


def test_f69_batch_axis_per_plane():
    geometry = cases()["decay"].backend.geometry(testing.decay_params(), batch=3, capacity=8)
    shapes = {plane.path: (plane.shape, plane.plane.batch_axis) for plane in geometry.planes}
    assert shapes["h"] == ((2, 3, 5), 1) and shapes["history"] == ((3, 8), 0)


# The registry.


def test_a_registry_is_a_value():
    empty = sc.Registry()
    model = sc.load((cases()["digit"].backend, None))
    registry = empty.register("digit", lambda config: model)
    assert empty.names == () and registry.names == ("digit",)
    assert registry.lookup("digit").load() is model
    assert registry.lookup({"architecture": "digit", "width": 3}).config["width"] == 3
    assert sc.load("digit", registry=registry) is model
    replaced = registry.register("digit", lambda config: None)
    assert replaced.names == ("digit",) and replaced.lookup("digit").load() is None


def test_unknown_models_are_refused_with_the_known_ones():
    with pytest.raises(sc.LoadError, match="'tiny-hybird'.*tiny-hybrid"):
        sc.load("tiny-hybird")
    for target in (3, ("backend", None), (cases()["digit"].backend,)):
        with pytest.raises(sc.LoadError):
            sc.load(target)
    with pytest.raises(sc.LoadError, match="None"):
        sc.default_registry().lookup({"name": "tiny-hybrid"})


# Estimates.


def test_an_estimate_is_the_bytes_of_the_leaves():
    case = cases()["digit"]
    state = case.state()
    geometry = case.backend.geometry(None, batch=2, capacity=40)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert sc.estimate(geometry) == sc.Estimate(retained_bytes=total, copy_bytes=total)


def test_an_unknown_size_is_none_and_not_zero():
    planes = {"q": pl.append(axis=1), "pos": pl.position()}
    state = {"q": lambda batch, capacity: jnp.zeros((batch, capacity), jnp.int4), "pos": ints()}
    geometry = backend_of(planes, state).geometry(None, batch=2, capacity=8)
    assert sc.estimate(geometry) is None
    assert sc.estimate_growth(geometry, 0, 1) is None


def test_growth_counts_rows():
    geometry = cases()["digit"].backend.geometry(None, batch=2, capacity=16)
    # kv: 4 bytes a token; ring: 4 bytes a row until W - 1 = 3 are held.
    assert sc.estimate_growth(geometry, 0, 0) == 0
    assert sc.estimate_growth(geometry, 0, 2) == 2 * (2 * 4 + 2 * 4)
    assert sc.estimate_growth(geometry, 2, 5) == 2 * (5 * 4 + 1 * 4)
    assert sc.estimate_growth(geometry, [3, 0], 1) == (4 + 0) + (4 + 4)
    assert sc.estimate_growth(geometry, 10, 6) == 2 * 6 * 4
    assert sc.estimate_growth(geometry, 10, 7) is None
    assert sc.estimate_growth(geometry, 0, 2**64) is None
    for length, num_tokens in ((-1, 1), (1, -1), ([1], 1)):
        with pytest.raises(sc.CapacityError):
            sc.estimate_growth(geometry, length, num_tokens)


def test_growth_never_falls():
    geometry = cases()["digit"].backend.geometry(None, batch=2, capacity=16)
    for length in range(17):
        grown = [sc.estimate_growth(geometry, length, n) for n in range(17 - length)]
        assert grown == sorted(grown) and np.all(np.array(grown) >= 0)

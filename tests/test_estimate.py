"""What a copy costs and what tokens add: laws over geometries, and real copies measured."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, cases
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import statecore as sc
from statecore import native
from statecore import planes as pl
from statecore.state import Geometry, make_geometry, make_layout

DTYPES = ["float32", "bfloat16", "int8", "int32"]


@st.composite
def geometries(draw, *, min_capacity: int = 1, max_capacity: int = 40) -> Geometry:
    """Any geometry: planes of each kind, with row and batch axes in any place, and absent ones."""
    batch, capacity = draw(st.integers(1, 3)), draw(st.integers(min_capacity, max_capacity))
    planes: dict = {"pos": pl.position(), "absent": None}
    struct: dict = {"pos": jax.ShapeDtypeStruct((batch,), jnp.int32), "absent": None}
    kinds = st.sampled_from(["append", "sliding", "shift", "recurrent", "constant", "opaque"])
    for number, kind in enumerate(draw(st.lists(kinds, max_size=5))):
        sizes = {"b": batch, "d": draw(st.integers(1, 3))}
        if kind == "append":
            sizes["s"] = capacity
        elif kind in ("sliding", "shift"):
            sizes["s"] = draw(st.integers(1, 8))
        order = draw(st.permutations(list(sizes)))
        axes = {"batch_axis": order.index("b")} | ({"axis": order.index("s")} if "s" in sizes else {})
        if kind == "sliding":
            axes["size"] = draw(st.integers(1, sizes["s"]))
        planes[f"p{number}"] = getattr(pl, kind)(**axes)
        shape = tuple(sizes[letter] for letter in order)
        struct[f"p{number}"] = jax.ShapeDtypeStruct(shape, jnp.dtype(draw(st.sampled_from(DTYPES))))
    return make_geometry("random", make_layout(planes), struct, batch, capacity)


def state_of(geometry: Geometry, lengths) -> dict:
    """Returns a state of the geometry that holds `lengths` tokens, made without any model."""
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), geometry.struct())
    return state | {"pos": jnp.asarray(lengths, jnp.int32)}


@given(st.data())
def test_na2_na4_an_estimate_is_the_bytes_of_a_copy(data):
    """NA2, NA4, NA8, NA28: exact bytes from shapes alone, plane by plane; absent leaves cost nothing."""
    geometry = data.draw(geometries())
    lengths = data.draw(st.lists(st.integers(0, geometry.capacity), min_size=geometry.batch, max_size=geometry.batch))
    state = state_of(geometry, lengths)
    found = sc.estimate(geometry, lengths=lengths)
    assert found is not None
    copied = sc.capture(state)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(copied))
    assert found == sc.Estimate(retained_bytes=total, copy_bytes=total)
    assert found.allocated_bytes == total == sum(plane.allocated_bytes for plane in found.planes)
    by_path = {plane.path: plane for plane in found.planes}
    assert set(by_path) == {name for name, leaf in copied.items() if leaf is not None}
    assert all(by_path[name].allocated_bytes == copied[name].nbytes for name in by_path)
    # `logical_bytes` counts what `equal` would compare, and knows nothing of the arithmetic.
    assert found.logical_bytes == native.logical_bytes(geometry.layout, state)
    for whole in (geometry.struct(), copied):
        shapes_only = sc.estimate(whole)
        assert shapes_only == found
        assert shapes_only is not None and shapes_only.logical_bytes is None


def test_na2_an_estimate_asks_no_device(monkeypatch):
    """NA2: pure, with shapes alone; neither a compile nor an operation on a device."""
    geometry = cases()["digit"].backend.geometry(None, batch=2, capacity=CAPACITY)
    shapes = geometry.struct()

    def forbidden(*args, **options):
        raise AssertionError("an estimate went to the device")

    from jax._src import core

    # Every operation on an array, traced or not, binds a primitive.
    monkeypatch.setattr(core.Primitive, "bind", forbidden)
    with pytest.raises(AssertionError, match="went to the device"):
        jnp.zeros(3) + 1
    assert sc.estimate(geometry, lengths=[1, 2]) == sc.estimate(shapes)
    assert sc.estimate_growth(geometry, [1, 2], 3) == 2 * 3 * 4 + (2 + 1) * 4


def test_na2_an_unknown_size_is_none_and_never_zero():
    """NA2, NB1: int4 storage depends on the device; the answer is None, for the whole and for growth."""
    layout = make_layout({"pos": pl.position(), "kv": pl.append(axis=1)})
    struct = {"pos": jax.ShapeDtypeStruct((1,), jnp.int32), "kv": jax.ShapeDtypeStruct((1, 8), jnp.int4)}
    geometry = make_geometry("int4", layout, struct, 1, 8)
    assert sc.estimate(geometry) is None and sc.estimate(struct) is None
    assert sc.estimate_growth(geometry, 0, 1) is None and sc.estimate_growth(geometry, 0, 1, bucket=4) is None
    with pytest.raises(sc.BudgetError, match="unknown"):
        native.SnapshotBudget(sc.SnapshotLimits()).reserve(sc.estimate(geometry))
    with pytest.raises(sc.GeometryError, match="`kv`"):
        sc.estimate({"kv": 3})


def test_na2_bytes_of_each_device_count_replicas():
    """NA2: a split plane costs a share on each device, a replicated one the whole on each."""
    devices = jax.devices()
    if len(devices) == 1:  # the number is fixed when a process starts, so that another one runs this
        assert "JAX_NUM_CPU_DEVICES" not in os.environ
        test = "tests/test_estimate.py::test_na2_bytes_of_each_device_count_replicas"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
        root, environment = Path(__file__).parent.parent, os.environ | {"JAX_NUM_CPU_DEVICES": "4"}
        ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout
        return
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    batch = len(devices)
    struct = {"h": jax.ShapeDtypeStruct((batch, 8), jnp.float32, sharding=split)}
    struct["pos"] = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=whole)
    found = sc.estimate(struct)
    assert found is not None and found.per_device == tuple((device, 32 + 4 * batch) for device in devices)
    layout = make_layout({"h": pl.recurrent(), "pos": pl.position()})
    geometry = make_geometry("sharded", layout, struct, batch, 8)
    assert sc.estimate(geometry, shardings=[split, whole]).per_device == found.per_device
    assert sc.estimate(geometry).per_device is None
    state = {"h": jax.device_put(jnp.zeros((batch, 8)), split), "pos": jax.device_put(jnp.zeros(batch, int), whole)}
    for device, size in found.per_device:
        shards = [s.data.nbytes for leaf in state.values() for s in leaf.addressable_shards if s.device == device]
        assert sum(shards) == size
    with pytest.raises(sc.GeometryError, match="1 shardings"):
        sc.estimate(geometry, shardings=[split])


def test_the_runtime_knows_its_devices():
    runtime = sc.Runtime(sc.load((cases()["digit"].backend, None)), batch=2, capacity=CAPACITY)
    cost = runtime.estimate()
    assert cost.per_device == ((jax.devices()[0], cost.retained_bytes),)
    assert runtime.estimate() is cost  # remembered until the state changes
    runtime.step([1, 2])
    assert runtime.estimate().logical_bytes == cost.logical_bytes + 2 * (4 + 4)


@given(st.data())
def test_na9_growth_is_sound_and_exact(data):
    """NA6, NA7, NA8, NA9: retained(t + n) = retained(t) + growth(n), measured on states, ragged or not."""
    geometry = data.draw(geometries())
    lengths = data.draw(st.lists(st.integers(0, geometry.capacity), min_size=geometry.batch, max_size=geometry.batch))
    num_tokens = data.draw(st.integers(0, geometry.capacity - max(lengths)))
    growth = sc.estimate_growth(geometry, lengths, num_tokens)
    before, after = state_of(geometry, lengths), state_of(geometry, [n + num_tokens for n in lengths])
    assert growth == native.measured_growth(geometry.layout, before, after)


@given(st.data())
def test_na6_growth_in_buckets_is_what_is_allocated(data):
    """NA6, NA9: whole buckets, at most the capacity, never fewer rows than there are now."""
    geometry = data.draw(geometries())
    lengths = data.draw(st.lists(st.integers(0, geometry.capacity), min_size=geometry.batch, max_size=geometry.batch))
    num_tokens = data.draw(st.integers(0, geometry.capacity - max(lengths)))
    bucket = data.draw(st.integers(1, 16))
    now = min(geometry.capacity, math.ceil(max(lengths) / bucket) * bucket)
    allocated = data.draw(st.none() | st.integers(now, geometry.capacity))
    rows = now if allocated is None else allocated
    needed = min(geometry.capacity, math.ceil((max(lengths) + num_tokens) / bucket) * bucket)
    before, after = (
        state_of(native.cut_geometry(geometry, count), length)
        for count, length in ((rows, lengths), (max(rows, needed), [n + num_tokens for n in lengths]))
    )
    growth = sc.estimate_growth(geometry, lengths, num_tokens, bucket=bucket, allocated=allocated)
    assert growth == native.measured_growth(geometry.layout, before, after, is_allocated=True)


@given(st.data())
def test_na10_growth_is_monotone(data):
    """NA5, NA10: more tokens never cost less; past the capacity there is no answer, and none after that."""
    geometry = data.draw(geometries())
    length = data.draw(st.integers(0, geometry.capacity))
    bucket = data.draw(st.none() | st.integers(1, 9))
    found = [sc.estimate_growth(geometry, length, n, bucket=bucket) for n in range(geometry.capacity + 3)]
    known = [growth for growth in found if growth is not None]
    assert known == sorted(known) and found[0] == 0
    assert found[: len(known)] == known  # None only at the end
    if geometry.layout.indices("append"):
        assert len(known) == geometry.capacity - length + 1


@given(st.integers(1, 6), st.integers(0, 12), st.integers(0, 12))
@example(window=1, length=5, num_tokens=5)
def test_na7_a_ring_keeps_at_most_its_window_less_one(window, length, num_tokens):
    """NA7: at most W - 1 rows once full; a window of 1 keeps none, and a full ring gains none."""
    layout = make_layout({"pos": pl.position(), "ring": pl.sliding(axis=1, size=window)})
    struct = {"pos": jax.ShapeDtypeStruct((1,), jnp.int32), "ring": jax.ShapeDtypeStruct((1, 8), jnp.int8)}
    growth = sc.estimate_growth(make_geometry("ring", layout, struct, 1, 99), length, num_tokens)
    kept = [min(n, window - 1) for n in (length, length + num_tokens)]
    assert growth == kept[1] - kept[0]
    assert window > 1 or growth == 0


@pytest.mark.parametrize("bucket", [None, 4])
def test_na5_overflow_is_none(bucket):
    """NA5: lengths past int32, past the capacity, or bytes past 64 bits give None and never wrap."""
    layout = make_layout({"pos": pl.position(), "ring": pl.sliding(axis=1, size=4)})
    struct = {"pos": jax.ShapeDtypeStruct((1,), jnp.int32), "ring": jax.ShapeDtypeStruct((1, 8), jnp.int8)}
    unbounded = make_geometry("ring", layout, struct, 1, 99)
    most = 2**31 - 1
    assert sc.estimate_growth(unbounded, 0, most, bucket=bucket) is not None
    for length, num_tokens in ((0, most + 1), (most, 1), (0, 2**64 - 1), (2**70, 0)):
        assert sc.estimate_growth(unbounded, length, num_tokens, bucket=bucket) is None
    layout = make_layout({"pos": pl.position(), "kv": pl.append(axis=1)})
    struct = {"pos": struct["pos"], "kv": jax.ShapeDtypeStruct((1, 2**30, 2**34), jnp.int8)}
    huge = make_geometry("huge", layout, struct, 1, 2**30)
    assert sc.estimate_growth(huge, 0, 2**28, bucket=bucket) == 2**62
    assert sc.estimate_growth(huge, 0, 2**29, bucket=bucket) is None
    assert sc.estimate_growth(huge, 2**30 + 1, 0, bucket=bucket) is None


@given(st.integers(1, 9), st.integers(0, 9))
def test_na11_inputs_are_counted_once(num_pending, num_predictions):
    """NA11: P + k - 1 inputs for a pending prompt, k for a pending token, 0 for none; counted by doing it."""
    pending, fed = num_pending, 0
    for _ in range(num_predictions):
        fed, pending = fed + pending, 1
    assert native.count_inputs(num_predictions, num_pending=num_pending) == fed
    assert native.count_inputs(num_predictions) == num_predictions


def test_bad_numbers_are_refused_whatever_is_remembered():
    geometry = cases()["digit"].backend.geometry(None, batch=2, capacity=CAPACITY)
    assert sc.estimate_growth(geometry, 3, 5) == sc.estimate_growth(geometry, [3, 3], 5)
    for bad in (
        (3, 5.0),
        (3.0, 5),
        (True, 5),
        ([3, True], 5),
        (3, True),
        ([3, 3.0], 5),
        (-1, 5),
        (3, -5),
        ([3], 5),
        ([3, None], 5),
    ):
        with pytest.raises(sc.CapacityError):
            sc.estimate_growth(geometry, *bad)
    for options in ({"bucket": 0}, {"bucket": 1.5}, {"allocated": 3}, {"bucket": 4, "allocated": -1}):
        with pytest.raises(sc.CapacityError):
            sc.estimate_growth(geometry, 3, 5, **options)
    for bad in ((-1, 1), (1, -1), (1, 0), (1.5, 1), (True, 1)):
        with pytest.raises(sc.CapacityError):
            native.count_inputs(bad[0], num_pending=bad[1])
    assert sc.estimate(geometry, lengths=[0, CAPACITY + 1]).logical_bytes is None
    with pytest.raises(sc.GeometryError, match="1 lengths"):
        sc.estimate(geometry, lengths=[3])


def test_answers_are_remembered_no_longer_than_their_geometry():
    import gc

    from statecore.native import _growth

    backend = cases()["digit"].backend
    geometry = backend.geometry(None, batch=2, capacity=CAPACITY)
    for n in range(600):
        sc.estimate_growth(geometry, 0, n % CAPACITY, bucket=1 + n // CAPACITY)
    entries = _growth._remembered._entries
    assert id(geometry) in entries and len(entries[id(geometry)][1]) <= 256
    name = id(geometry)
    del geometry
    gc.collect()
    assert name not in entries


def test_na2_lengths_of_an_estimate_are_whole_numbers():
    """NA2: any kind of integer is one; what is none is refused, never cut or counted below zero."""
    geometry = cases()["digit"].backend.geometry(None, batch=2, capacity=CAPACITY)
    wanted = sc.estimate(geometry, lengths=[3, 3]).logical_bytes
    for fine in (3, np.int64(3), np.array([3, 3]), jnp.array([3, 3]), (np.int32(3), 3)):
        assert sc.estimate(geometry, lengths=fine).logical_bytes == wanted
    for bad in (-3, [3, -1], [3.7, 2], 2.0, True, "ab", [[3, 3]], [None, 3]):
        with pytest.raises(sc.GeometryError, match="lengths"):
            sc.estimate(geometry, lengths=bad)


def test_na4_the_estimate_of_a_slot_follows_the_runtime_that_is_asked():
    """NA4: one slot, runtimes of two capacities; and a slot with other lengths made from it."""
    model = sc.load((cases()["digit"].backend, None))
    small, large = (sc.Runtime(model, batch=2, capacity=capacity) for capacity in (CAPACITY, 64))
    small.extend([[1, 2, 3], [3, 2, 1]])
    slot = small.capture(mode="compact")
    for runtime in (small, large, small):
        copied = runtime.copy(slot)
        assert runtime.estimate(slot).copy_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(copied.state))
    whole = small.capture()
    known = small.estimate(whole)
    lengths = np.array([5, 5])
    longer = dataclasses.replace(whole, lengths=lengths, state=whole.state | {"pos": jnp.array(lengths, jnp.int32)})
    assert small.estimate(longer).logical_bytes > known.logical_bytes


def test_na2_a_slot_is_priced_where_it_is_and_checked_for_it():
    """NA2, NA18: the bytes of each device are of the slot's planes; a plane on another device is refused."""
    devices = jax.devices()
    if len(devices) == 1:  # the number is fixed when a process starts, so that another one runs this
        assert "JAX_NUM_CPU_DEVICES" not in os.environ
        test = "tests/test_estimate.py::test_na2_a_slot_is_priced_where_it_is_and_checked_for_it"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
        root, environment = Path(__file__).parent.parent, os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout
        return
    runtime = sc.Runtime(sc.load((cases()["digit"].backend, None)), batch=2, capacity=CAPACITY)
    slot = runtime.capture()
    moved = dataclasses.replace(slot, state=slot.state | {"h": jax.device_put(slot.state["h"], devices[1])})
    with pytest.raises(sc.GeometryError, match="`h` of this slot is on"):
        runtime.validate(moved)
    runtime.validate(slot)
    split = NamedSharding(Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, split) if leaf.shape[:1] == (2,) else leaf, runtime.state)
    runtime.replace_state(state)
    found = runtime.capture()
    held = runtime.exchange(slot)
    for priced in (found, held):
        for device, size in runtime.estimate(priced).per_device:
            leaves = jax.tree.leaves(priced.state)
            assert size == sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)

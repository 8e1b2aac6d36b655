"""The pool of snapshot slots: sizes, slots and their handles, bits, donation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits, cases, host, poisoned, refuses

import statecore as sc
from statecore import planes as pl
from statecore import store, testing

MIB = 2**20


@pytest.fixture
def case():
    return cases()["digit"]


def make(case, num_slots: int = 3, **options) -> sc.SnapshotPool:
    return sc.SnapshotPool(case.backend, case.params, num_slots=num_slots, **options)


def fed(case, *rows: list[int]):
    """Returns a state of sequences that were fed these tokens."""
    width = max(map(len, rows))
    tokens = [row + [0] * (width - len(row)) for row in rows]
    state = case.backend.init(case.params, batch=len(rows), capacity=40)
    return sc.extend(case.backend, case.params, state, np.array(tokens), num_valid=[len(row) for row in rows])[0]


def raw(pool: sc.SnapshotPool, slot: int) -> list[np.ndarray]:
    """Returns the bits of a slot, the dummy's included, through no handle."""
    return [np.array(leaf) for leaf in pool._read(slot)]


def hybrid(*, layers=48, heads=48, key_heads=16, size=128, taps=4, dtype=jnp.float32) -> sc.Geometry:
    """Returns the geometry of a delta-rule model, declared and never allocated."""
    width = 2 * key_heads * size + heads * size
    backend = sc.Backend(
        name="delta",
        init=lambda params, batch, capacity: {
            "h": jnp.zeros((layers, batch, heads, size, size), dtype),
            "conv": jnp.zeros((layers, batch, width, taps), jnp.float32),
            "pos": jnp.zeros(batch, jnp.int32),
        },
        step=lambda params, state, tokens: (state, jnp.zeros((tokens.shape[0], 2))),
        planes={"h": pl.recurrent(batch_axis=1), "conv": pl.shift(axis=3, batch_axis=1), "pos": pl.position()},
    )
    return backend.geometry(None, batch=2, capacity=8)


# Sizes.


def test_s32_golden_bytes():
    """S32: every number of a 48-layer hybrid comes out of its declared shapes."""
    geometry, width, slots = hybrid(), 4, 32
    assert store.sequence_bytes(geometry, "recurrent") == 150_994_944
    assert store.sequence_bytes(geometry, "shift") == 7_864_320
    assert store.sequence_bytes(geometry, "recurrent", "shift") == 158_859_264
    tiers = store.verify_tiers(slots, [(4, 3), (8, 3), (16, 1), (32, 1)])
    assert tiers == (3,) * 8 + (1,) * 24
    tiered = store.SlotPlan(live=128, verify=tuple((steps, width) for steps in tiers))
    assert store.plan_bytes(geometry, tiered) == 33_671_872_512
    uniform = store.SlotPlan(live=128, verify=((width, width),) * slots)
    assert store.plan_bytes(geometry, uniform) == 45_751_468_032
    assert store.plan_bytes(hybrid(dtype=jnp.float16), tiered) == 17_968_398_336


def test_s32_golden_bytes_of_a_replay():
    """S32: a replay keeps one checkpoint a slot, and K - 1 rows of inputs instead of states."""
    geometry, width, slots = hybrid(), 4, 32
    inputs = {
        "qkvz": jax.ShapeDtypeStruct((48, 2 * 16 * 128 + 2 * 48 * 128), jnp.bfloat16),
        "gates": jax.ShapeDtypeStruct((48, 2, 48), jnp.float32),
    }
    rows = store.SlotPlan(replay_rows=slots * (width - 1))
    assert store.plan_bytes(geometry, rows, inputs=inputs) == 152_764_416
    plan = dataclasses.replace(rows, live=128, verify=((0, 0),) * slots)
    assert store.plan_bytes(geometry, plan, inputs=inputs) == 25_570_246_656


def test_s32_golden_bytes_of_slots():
    """S32: snapshots, live slots, the boundary ring, and one verify slot of a smaller hybrid."""
    geometry = hybrid()
    assert store.plan_bytes(geometry, store.SlotPlan(snapshots=16)) == 2424 * MIB
    assert store.plan_bytes(geometry, store.SlotPlan(live=4)) == 606 * MIB
    assert store.plan_bytes(geometry, store.SlotPlan(ring=8 * 32)) == 37.875 * 1024 * MIB
    small = hybrid(layers=30, heads=32)
    assert store.sequence_bytes(small, "recurrent", "shift") == 66_846_720
    assert store.sequence_bytes(hybrid(layers=36, heads=32), "recurrent", "shift") == 80_216_064
    assert store.plan_bytes(small, store.SlotPlan(verify=((1, 2),))) == 137_625_600


@pytest.mark.parametrize("name", ["digit", "decay"])
@pytest.mark.parametrize("kinds", [("position", "shift", "recurrent"), ("position", "recurrent", "sliding")])
def test_s32_s48_what_is_estimated_is_allocated(name, kinds):
    """S32, S48: one function of the declared shapes gives the bytes of both, the dummy's included."""
    case = cases()[name]
    pool = make(case, 5, kinds=kinds)
    geometry = case.backend.geometry(case.params, batch=3, capacity=40)
    wanted = store.pool_bytes(geometry, 5, kinds=kinds)
    assert wanted == pool.nbytes == sum(leaf.nbytes for leaf in pool._pool)
    assert wanted > 0


def test_s48_a_recurrent_plane_without_elements_is_refused():
    """S48, F11: every checkpoint of it would be a copy of nothing."""
    with pytest.raises(sc.GeometryError, match=r"`h`.*no elements.*copy nothing"):
        store.pool_bytes(hybrid(heads=0), 4)


def test_s48_an_unknown_size_is_not_zero():
    """S48: a plane whose storage is not known makes the bytes None."""
    geometry = hybrid()
    planes = tuple(
        dataclasses.replace(plane, dtype=jnp.dtype("int4")) if plane.path == "h" else plane for plane in geometry.planes
    )
    geometry = dataclasses.replace(geometry, planes=planes)
    assert store.pool_bytes(geometry, 4) is None
    assert store.plan_bytes(geometry, store.SlotPlan(live=1)) is None


def test_s40_a_pool_of_none(case):
    """S40: it allocates nothing, has no occupancy, and is always full."""
    pool = make(case, 0)
    assert (pool.occupancy, pool.nbytes, pool._pool) == (None, 0, [])
    with pytest.raises(sc.BudgetError, match="All 0 slots"):
        pool.claim()
    with pytest.raises(sc.GeometryError, match="-1"):
        make(case, -1)


def test_s33_drafts_are_as_many_as_every_active_slot_is_ready_for():
    """S33: the least of the active slots' tiers; a slot beyond them all is ready for none."""
    tiers = store.verify_tiers(32, [(4, 3), (8, 3), (16, 1), (32, 1)])
    cases = [([0, 5, 7], 3), ([0, 8], 1), ([31], 1), ([0, 32], 0), ([], None)]
    for active, most in cases:
        assert store.draft_limit(tiers, active) == most
    assert store.verify_tiers(4, [(2, 3)]) == (3, 3, 0, 0)
    assert store.draft_limit(store.verify_tiers(4, [(2, 3)]), [1, 2]) == 0
    for wrong in ([-1], [0.5], [True]):
        with pytest.raises(sc.GeometryError, match="slot"):
            store.draft_limit(tiers, wrong)


# Slots and handles.


def test_f39_s40_full_freed_twice_and_back_to_nothing(case):
    """F39, S40, S41, SB17: one more than all is an error, a second free is another, and nothing leaks."""
    pool = make(case)
    handles = [pool.claim() for _ in range(3)]
    assert [handle.slot for handle in handles] == [0, 1, 2] and pool.occupancy == (3, 3)
    with pytest.raises(sc.BudgetError, match="All 3 slots"):
        pool.claim()
    pool.free(handles[1])
    with pytest.raises(sc.StateConsumedError, match="Slot 1 was freed.*generation 0, now 1.*twice"):
        pool.free(handles[1])
    assert pool.occupancy == (2, 3)
    pool.free(handles[0])
    assert pool.claim().slot == 0  # the lowest first
    assert [pool.claim().slot, pool.occupancy] == [1, (3, 3)]
    for handle in (handles[0], handles[1]):
        assert not pool.is_live(handle)
    pool.free(handles[2])
    assert pool.occupancy == (2, 3)


def test_s41_a_stale_handle_reads_and_writes_nothing(case):
    """S41, SB18: what was freed is not the next owner's, whoever still has the handle."""
    pool, state = make(case), fed(case, [1, 2, 3])
    old = pool.claim()
    pool.save(old, state, 0)
    pool.free(old)
    new = pool.claim()
    assert new.slot == old.slot
    before = raw(pool, 0)
    calls = [
        lambda: pool.save(old, state, 0),
        lambda: pool.save_rows([old], state),
        lambda: pool.load(old),
        lambda: pool.restore_into(state, 0, old),
        lambda: pool.copy(old),
        lambda: pool.compact([old]),
        lambda: pool.free(old),
    ]
    for call in calls:
        refuses(sc.StateConsumedError, call, state, "Slot 0", "freed")
    assert_bits(before, pool.load(new))
    assert pool.occupancy == (1, 3)


def test_a_handle_of_another_pool_is_refused(case):
    ours, theirs = make(case), make(case)
    handle = theirs.claim()
    ours.claim()
    with pytest.raises(sc.IdentityError, match="another pool"):
        ours.load(handle)


@pytest.mark.parametrize("name", ["digit", "decay"])
def test_f37_a_recycled_slot_is_as_init_makes_it(name):
    """F37, F40: a slot full of NaN, freed and claimed, goes on as an empty sequence."""
    case = cases()[name]
    pool, kinds = make(case), ("position", "shift", "recurrent")
    handle = pool.claim()
    state = fed(case, [5, 6])
    broken = poisoned(state) | {"pos": state["pos"]}
    pool.save(handle, broken, 0)
    pool.free(handle)
    again = pool.claim()
    assert again.slot == handle.slot
    empty = case.backend.init(case.params, capacity=40)
    wanted = [case.backend.layout.leaves(empty)[i] for i in case.backend.layout.indices(*kinds)]
    assert_bits(host(wanted), list(pool.load(again).values()))
    restored = pool.restore_into(fed(case, [9, 9, 9]), 0, again)
    restored, _ = sc.extend(case.backend, case.params, restored, [[1, 2]])
    assert sc.equal(case.backend, restored, sc.extend(case.backend, case.params, empty, [[1, 2]])[0])
    if name == "digit":
        assert restored["h"].item() == 12


def test_f37_initial_is_not_zero():
    """F37, F40: a running maximum starts at -1e38, and a claim says so."""
    backend = sc.Backend(
        name="running",
        init=lambda params, batch, capacity: {
            "best": jnp.full((batch, 2), params, jnp.float32),
            "pos": jnp.zeros(batch, jnp.int32),
        },
        step=lambda params, state, tokens: (state | {"pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 2))),
        planes={"best": pl.recurrent(), "pos": pl.position()},
    )
    pool = sc.SnapshotPool(backend, jnp.float32(-1e38), num_slots=1)
    handle = pool.claim()
    pool.save(handle, {"best": jnp.ones((1, 2)), "pos": jnp.ones(1, jnp.int32)}, 0)
    pool.free(handle)
    assert pool.load(pool.claim())["best"].tolist() == [[np.float32(-1e38)] * 2]


@pytest.mark.parametrize("name", ["digit", "digit-own", "decay"])
def test_s34_sb34_padding_rows_never_write_a_claimed_slot(name):
    """S34, SB34: padding goes to the dummy, which nobody can claim."""
    case = cases()[name]
    pool, state = make(case), fed(case, [1, 2], [3, 4, 5], [6])
    first, second = pool.claim(), pool.claim()
    pool.save(first, state, 0)
    kept = raw(pool, first.slot)
    pool.save_rows([None, second, None], state)
    assert_bits(kept, list(pool.load(first).values()))
    third = pool.claim()
    assert [third.slot, pool.num_slots] == [2, 3]
    restored = pool.restore_into(fed(case, [7, 7, 7], [8]), 1, second, writes_rest=True)
    assert restored["pos"].tolist() == [3, 3]
    assert_bits(
        host([restored["h"].take(1, axis=case.backend.planes["h"].batch_axis)]),
        [state["h"].take(1, axis=case.backend.planes["h"].batch_axis)],
    )
    with pytest.raises(sc.BudgetError):
        pool.claim()


def test_save_rows_wants_one_slot_each(case):
    pool, state = make(case), fed(case, [1, 2], [3, 4])
    one, two = pool.claim(), pool.claim()
    before = [raw(pool, slot) for slot in range(4)]
    refuses(sc.GeometryError, lambda: pool.save_rows([one, one], state), state, "1 slots of them different")
    refuses(sc.GeometryError, lambda: pool.save_rows([one, two, None], state), state, "3 handles", "2 sequences")
    pool.save_rows([None, None], state)
    for slot in range(3):
        assert_bits(before[slot], raw(pool, slot))


def test_s35_copy_and_compaction_move_every_plane(case):
    """S35: survivors take the lowest slots with all their planes; old handles are stale."""
    pool, state = make(case, 4), fed(case, [1, 2, 3], [4, 5, 6, 7])
    handles = [pool.claim() for _ in range(3)]
    pool.save(handles[1], state, 0)
    pool.save(handles[2], state, 1)
    other = pool.copy(handles[2])
    pool.save(handles[2], state, 0)
    assert [pool.load(other)["h"].item(), pool.load(handles[2])["h"].item()] == [4567, 123]
    wanted = [raw(pool, handle.slot) for handle in (other, handles[1])]
    pool.free(handles[0])
    pool.free(handles[2])
    with pytest.raises(sc.GeometryError, match="1 of the 2 slots in use"):
        pool.compact([other])
    moved = pool.compact([other, handles[1]])
    assert [handle.slot for handle in moved] == [1, 0]
    for before, handle in zip(wanted, moved, strict=True):
        assert_bits(before, list(pool.load(handle).values()))
    assert not any(map(pool.is_live, (*handles, other)))
    assert [pool.claim().slot, pool.claim().slot, pool.occupancy] == [2, 3, (4, 4)]


# Bits and donation.


@pytest.mark.parametrize("name", ["digit", "decay"])
@pytest.mark.parametrize("donate", [False, True])
def test_s47_save_and_restore_keep_the_bits(name, donate):
    """S47: the planes of one sequence go through a slot unchanged, again and again; the others stay."""
    case = cases()[name]
    pool, source = make(case), fed(case, [1, 2, 3, 4, 5], [6, 7])
    handle = pool.claim()
    pool.save(handle, source, 1)
    planes = host(pool.load(handle))
    source, _ = sc.step(case.backend, case.params, source, [1, 1], donate=True)  # the source is not the slot
    for _ in range(2):
        state = fed(case, [9, 9], [8], [7, 7, 7])
        before = host(sc.take_rows(case.backend, state, [0, 2]))
        restored = pool.restore_into(state, 1, handle, donate=donate, writes_rest=True)
        assert_bits(before, sc.take_rows(case.backend, restored, [0, 2]))
        assert restored["pos"].tolist() == [2, 2, 3]
        for path, leaf in pool.load(handle).items():
            axis = case.backend.planes[path].batch_axis or 0
            assert np.array(restored[path].take(1, axis=axis)).tobytes() == planes[path].tobytes()
            assert np.array(leaf).tobytes() == planes[path].tobytes()
        if donate:
            with pytest.raises(sc.StateConsumedError):
                sc.equal(case.backend, state, restored)
        else:
            assert_bits(before, sc.take_rows(case.backend, state, [0, 2]))
            pointers = [leaf.unsafe_buffer_pointer() for tree in (state, restored) for leaf in jax.tree.leaves(tree)]
            assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_s47_f73_each_dtype_keeps_its_bits(dtype):
    """S47, F73: 1 + 2^-10, -0.0 and NaN stay what they are, in the width the model declared."""
    backend = sc.Backend(
        name="typed",
        init=lambda params, batch, capacity: {"h": jnp.zeros((batch, 3), dtype), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: (state | {"pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 2))),
        planes={"h": pl.recurrent(), "pos": pl.position()},
    )
    pool = sc.SnapshotPool(backend, None, num_slots=2)
    state = {"h": jnp.array([[1 + 2**-10, -0.0, jnp.nan]], dtype), "pos": jnp.array([7], jnp.int32)}
    handle = pool.claim()
    pool.save(handle, state, 0)
    assert_bits(host(state), pool.restore_into(backend.init(None, capacity=8), 0, handle))
    assert pool.load(handle)["h"].dtype == dtype
    narrow = {"h": state["h"].astype(jnp.float8_e5m2), "pos": state["pos"]}
    refuses(sc.GeometryError, lambda: pool.save(handle, narrow, 0), narrow, "`h`", "float8_e5m2[1, 3]")


def test_f45_donation_leaves_the_bookkeeping_alone():
    """F45: the free list is no part of what is donated, every write is in place, and one compile serves all."""
    backend = testing.digit_backend()
    pool = sc.SnapshotPool(backend, None, num_slots=4)
    state = sc.extend(backend, None, backend.init(None, batch=3, capacity=16), np.arange(9).reshape(3, 3))[0]
    handles = [pool.claim() for _ in range(3)]
    write = backend.compiled[("pool_write", pool._indices)]
    claims = write._cache_size()
    for row, handle in enumerate(handles):
        pool.save(handle, state, row)
        assert pool.occupancy == (3, 4)
    pool.restore_into(pool.restore_into(state, 0, handles[1]), 2, handles[0])
    assert [pool.load(handle)["h"].item() for handle in handles] == [12, 345, 678]
    assert (claims, write._cache_size()) == (1, 2)  # one for a fresh sequence, one for a batch of three
    assert backend.compiled[("pool_read", pool._indices)]._cache_size() == 1
    assert backend.compiled[("write_row", False, pool._indices)]._cache_size() == 1
    index = np.zeros(1, np.int32)
    lowered = write.lower(pool._pool, pool._own(state), index, index)
    assert lowered.compile().memory_analysis().alias_size_in_bytes == pool.nbytes
    pool.copy(handles[0])
    every = np.zeros(4, np.int32)
    move = backend.compiled[("pool_move", pool._indices)].lower(pool._pool, every, every)
    assert move.compile().memory_analysis().alias_size_in_bytes == pool.nbytes


def test_restoring_in_place_donates_what_it_writes(case):
    pool, state = make(case), fed(case, [1, 2], [3, 4])
    handle = pool.claim()
    pool.save(handle, state, 1)
    others = {name: state[name].unsafe_buffer_pointer() for name in ("kv", "ring")}
    restored = pool.restore_into(state, 0, handle, donate=True)
    assert {name: restored[name].unsafe_buffer_pointer() for name in others} == others
    indices = case.backend.layout.indices("position", "shift", "recurrent")
    leaves = [case.backend.layout.leaves(restored)[i] for i in indices]
    new = [pool.planes(handle)[i] for i in indices]
    run = case.backend.compiled[("write_row", True, indices)].lower(leaves, np.zeros(1, np.int32), new)
    assert run.compile().memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in leaves)


# What is refused.


def test_a_write_that_fails_fences_the_pool(case, monkeypatch):
    """A write that took the slots and failed has lost them; the pool says so, and counts nothing wrong."""
    pool, state = make(case), fed(case, [1, 2])
    handle = pool.claim()

    def fails(pool, *args):
        for leaf in pool:
            leaf.delete()
        raise RuntimeError("out of memory")

    monkeypatch.setitem(case.backend.compiled, ("pool_write", pool._indices), fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        pool.save(handle, state, 0)
    monkeypatch.undo()
    for call in (lambda: pool.save(handle, state, 0), lambda: pool.load(handle), pool.claim):
        refuses(sc.FencedError, call, state, "lost", "new pool")
    assert pool.occupancy == (1, 3)


def test_bad_states_and_rows_change_nothing(case):
    pool, state = make(case), fed(case, [1, 2], [3, 4])
    handle = pool.claim()
    before = raw(pool, 0)
    for row in (-1, 2):
        refuses(sc.GeometryError, lambda row=row: pool.save(handle, state, row), state, f"Row {row}", "2 sequences")
        refuses(sc.GeometryError, lambda row=row: pool.restore_into(state, row, handle), state, f"Row {row}")
    wide = state | {"conv": jnp.zeros((2, 4), jnp.int32)}
    refuses(sc.GeometryError, lambda: pool.save(handle, wide, 0), wide, "`conv`", "int32[1, 4]", "int32[1,3]")
    window = sc.verify(case.backend, None, state, [[5], [6]])
    refuses(sc.GeometryError, lambda: pool.save(handle, window, 0), state, "planes")
    refused = jax.jit(lambda s: sc.step(case.backend, None, s, jnp.array([10, 1]))[0])(state)
    refuses(sc.RefusedError, lambda: pool.save(handle, refused, 0), refused)
    with pytest.raises(sc.UnsupportedError, match="outside of `jit`"):
        jax.jit(lambda s: pool.restore_into(s, 0, handle))(state)
    assert_bits(before, raw(pool, 0))
    sc.step(case.backend, None, state, [1, 1], donate=True)
    with pytest.raises(sc.StateConsumedError, match="donate=True"):
        pool.save(handle, state, 0)


def test_opaque_planes_and_kinds_that_grow_are_refused(case):
    backend = sc.Backend(
        name="opaque",
        init=lambda params, batch, capacity: {"seen": jnp.zeros(batch, jnp.int32), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: (state, jnp.zeros((tokens.shape[0], 10))),
        planes={"seen": pl.opaque(), "pos": pl.position()},
    )
    with pytest.raises(sc.UnsupportedError, match="`seen`.*opaque"):
        sc.SnapshotPool(backend, None, num_slots=1)
    for kinds in (("position", "append"), ("recurrent",), ("position", "opaque")):
        with pytest.raises(sc.UnsupportedError, match="cannot be pooled"):
            make(case, kinds=kinds)

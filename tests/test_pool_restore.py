"""What a slot restored into a row must find there, and moves that fail on the way."""

import jax
import numpy as np
import pytest
from helpers import CAPACITY, assert_bits, cases, refuses

import statecore as sc
from statecore import testing

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def case():
    return cases()["digit"]


def fed(case, tokens):
    state = case.backend.init(case.params, batch=1, capacity=CAPACITY)
    return sc.extend(case.backend, case.params, state, [tokens])[0] if tokens else state


def saved(case, num_tokens, **options):
    pool = sc.SnapshotPool(case.backend, case.params, num_slots=4, capacity=CAPACITY, **options)
    handle = pool.claim()
    pool.save(handle, fed(case, TEXT[:num_tokens]), 0)
    return pool, handle


# Planes that are not the pool's.


def test_f01_a_row_shorter_than_the_slot_is_refused(case):
    """F01, F27: rows below the position that were never written would be read as zeros."""
    pool, handle = saved(case, 5)
    state = fed(case, [])
    refuses(sc.RollbackError, lambda: pool.restore_into(state, 0, handle), state, "`kv`", "`ring`", "never written")
    refuses(sc.RollbackError, lambda: pool.restore_into(state, 0, handle, donate=True), state, "5 tokens", "only 0")
    mine = pool.restore_into(state, 0, handle, writes_rest=True)
    whole = mine | {name: fed(case, TEXT[:5])[name] for name in ("kv", "ring")}
    assert sc.equal(case.backend, whole, fed(case, TEXT[:5]))


def test_a_ring_that_has_wrapped_is_refused(case):
    """Saved at 3 tokens, restored where 17 are: the ring of 12 has lost what the slot's tokens see."""
    pool, handle = saved(case, 3)
    for highest in (None, 17):
        state = fed(case, TEXT)
        call = lambda s=state, h=highest: pool.restore_into(s, 0, handle, highest=h)  # noqa: E731
        refuses(sc.RollbackError, call, state, "`ring`", "sliding")
    # Nine below the highest is what a ring of 12 with a window of 4 can undo; the caller knows the highest.
    state = fed(case, TEXT[:12])
    assert sc.equal(case.backend, pool.restore_into(state, 0, handle, highest=12), fed(case, TEXT[:3]))
    refuses(sc.RollbackError, lambda: pool.restore_into(state, 0, handle, highest=13), state, "12")
    refuses(sc.RollbackError, lambda: pool.restore_into(state, 0, handle), state, "not known")
    refuses(sc.GeometryError, lambda: pool.restore_into(state, 0, handle, highest=1.5), state, "highest")


def test_where_the_row_is_as_long_as_the_slot_nothing_is_lost(case):
    """Drafts were written past it and dropped: what the tokens see is still there."""
    pool, handle = saved(case, 6)
    window = sc.verify(case.backend, None, fed(case, TEXT[:6]), [[9] * 9])
    back = pool.restore_into(sc.commit(case.backend, window, 0), 0, handle)
    assert sc.equal(case.backend, back, fed(case, TEXT[:6]))


def test_a_pool_that_holds_the_rings_goes_back_any_distance(case):
    pool, handle = saved(case, 3, kinds=("position", "shift", "recurrent", "sliding"))
    assert sc.equal(case.backend, pool.restore_into(fed(case, TEXT), 0, handle), fed(case, TEXT[:3]))


def test_what_is_no_handle_is_refused(case):
    pool, _ = saved(case, 3)
    state = fed(case, TEXT)
    for call in (
        lambda: pool.load(None),
        lambda: pool.free(0),
        lambda: pool.save(None, state, 0),
        lambda: pool.restore_into(state, 0, None),
        lambda: pool.copy(None),
        lambda: pool.is_live(None),
        lambda: pool.compact([None]),
    ):
        refuses(sc.GeometryError, call, state, "`claim`")


# Moves.


def compacting(case):
    pool = sc.SnapshotPool(case.backend, case.params, num_slots=6)
    handles = [pool.claim() for _ in range(6)]
    for number, handle in enumerate(handles):
        pool.save(handle, fed(case, [number + 1]), 0)
    for handle in handles[::2]:
        pool.free(handle)
    return pool, handles[1::2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_s35_sb35_a_compaction_that_fails_moves_nothing(case, error, nth, monkeypatch):
    """S35, SB35: at whichever of its device calls it stops, no handle points at another sequence."""
    pool, handles = compacting(case)
    pool.free(pool.copy(handles[0]))  # compiles the move
    move, calls = case.backend.compiled["pool_move", pool._indices], []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == nth:
            raise error
        return move(*args)

    monkeypatch.setitem(case.backend.compiled, ("pool_move", pool._indices), interrupted)
    try:
        handles = pool.compact(handles)
    except error:
        assert pool.occupancy == (3, 6)
    assert calls and [pool.load(handle)["h"].item() for handle in handles] == [2, 4, 6]
    nth = 0
    done = pool.compact(handles)
    assert [handle.slot for handle in done] == [0, 1, 2]
    assert [pool.load(handle)["h"].item() for handle in done] == [2, 4, 6]
    assert [pool.claim().slot for _ in range(3)] == [3, 4, 5]


def test_f39_a_copy_that_fails_gives_its_slot_back(case, monkeypatch):
    """F39: nothing leaks; the slot can be claimed again."""
    pool, handle = saved(case, 3)

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setitem(case.backend.compiled, ("pool_move", pool._indices), fails)
        with pytest.raises(MemoryError):
            pool.copy(handle)
    assert pool.occupancy == (1, 4)
    assert pool.load(pool.copy(handle))["h"].item() == 123


def test_s35_a_claim_is_as_init_makes_it_and_compaction_is_one_compile():
    """S35: what a slot held is gone when it is claimed; any number of slots moves in one compiled call."""
    backend = testing.digit_backend()
    pool = sc.SnapshotPool(backend, None, num_slots=4)
    state = sc.extend(backend, None, backend.init(None, capacity=8), [[7, 7]])[0]
    handles = [pool.claim() for _ in range(4)]
    for handle in handles:
        pool.save(handle, state, 0)
    pool.free(handles[0])
    rest = pool.compact(handles[1:])
    pool.free(rest[0])
    rest = pool.compact(rest[1:])
    fresh = pool.claim()
    empty = backend.init(None, capacity=8)
    for path, leaf in pool.load(fresh).items():
        assert_bits([np.array(empty[path])], [leaf])
    assert [pool.load(handle)["h"].item() for handle in rest] == [77, 77]
    assert backend.compiled[("pool_move", pool._indices)]._cache_size() == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(pool._pool))

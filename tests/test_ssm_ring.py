"""The decode-rollback ring, and what a ring of attention rows can undo."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, assert_bits, cases, host, refuses
from hypothesis import given
from hypothesis import strategies as st
from sequences import PROMPT, WINDOW, attention_backend, begun, cached, same, start

import statecore as sc
from statecore import ssm, testing


def test_s22_a_ring_save_is_bits_and_is_not_consumed():
    """S22, F42: NaN and -0.0 included; restored twice."""
    case = cases()["decay"]
    seq = start("decay")
    odd = seq.state | {"h": seq.state["h"].at[0, 0, 0].set(jnp.nan).at[0, 1, 0].set(-0.0)}
    seq = ssm.begin(case.backend, odd, tokens=PROMPT, ring_slots=2)
    saved = ssm.save_ring(seq)
    for _ in range(2):
        later, _ = ssm.step(case.params, saved, [1, 2])
        restored = ssm.restore_ring(later, 0)
        assert sc.equal(case.backend, restored.state, odd)
        saved = restored


def test_s21_ring_slots_are_checked_before_anything_is_copied():
    """S21, S25: out of range, never written, or no ring at all."""
    seq = start(ring_slots=2)
    for slot in (2, -1):
        refuses(sc.RollbackError, lambda slot=slot: ssm.save_ring(seq, slot), seq.state, "does not exist")
        refuses(sc.RollbackError, lambda slot=slot: ssm.restore_ring(seq, slot), seq.state, "does not exist")
    refuses(sc.RollbackError, lambda: ssm.restore_ring(seq, 1), seq.state, "never written")
    bare = start(ring_slots=0)
    assert ssm.ring_slots(bare) == 0 and ssm.ring_slots(seq) == 2
    refuses(sc.RollbackError, lambda: ssm.save_ring(bare), bare.state, "0 slots")


def test_sequences_of_different_lengths_have_no_common_save():
    opened, _ = ssm.verify(None, start(), WINDOW)
    uneven = ssm.commit_accepted_prefix(opened, [1, 2], 4)
    refuses(sc.UnsupportedError, lambda: ssm.save_ring(uneven), uneven.state, "[4, 5]")


@given(moves=st.lists(st.one_of(st.integers(1, 3), st.integers(-6, -1)), max_size=40), num_slots=st.integers(1, 4))
def test_s23_s24_ring_bookkeeping(moves, num_slots):
    """S23, S24, SB07: slots are disjoint, at most cap; survivors live until cap new records."""
    ring, length = ssm.Ring(num_slots), 0
    saved = {}
    for move in moves:
        if move > 0:
            length += move
            ring, slot = ring.record(length)
            saved[slot] = length
        else:
            length = max(0, length + move)
            ring = ring.truncated(length)
        slots = [entry.slot for entry in ring.entries]
        assert len(set(slots)) == len(slots) <= num_slots
        assert all(entry.position <= length for entry in ring.entries)
        # What the entry says is what was last written there.
        assert all(saved[entry.slot] == entry.position for entry in ring.entries)
        free = num_slots - len(slots)
        survivors, filled = set(ring.entries), ring
        for extra in range(free):
            filled, _ = filled.record(length + extra + 1)
            assert survivors <= set(filled.entries)


def test_s30_ring_depth():
    """S30: five rules in order; `auto` or 0 to 8."""
    assert ssm.choose_ring_slots(False, published=8).num_slots == 0
    assert ssm.choose_ring_slots(True, published=3, switch=False).num_slots == 3
    assert ssm.choose_ring_slots(True, switch=True, is_reachable=False).num_slots == 8
    assert ssm.choose_ring_slots(True, switch=False).num_slots == 0
    unreachable = ssm.choose_ring_slots(True, is_reachable=False)
    assert unreachable.num_slots == 0 and unreachable.reason
    assert ssm.choose_ring_slots(True) == ssm.RingDepth(8)
    assert ssm.parse_ring_slots("auto") is None and ssm.parse_ring_slots("8") == 8
    for text in ("9", "-1", "many", ""):
        with pytest.raises(sc.RollbackError):
            ssm.parse_ring_slots(text)


def test_s31_ring_fit():
    """S31, SB10: the ladder 8, 4, 2, 1, 0; 0 as well when the reserve itself does not fit."""
    fit = lambda free, most=8: ssm.fit_ring_slots(most, bytes_per_slot=10, reserved_bytes=100, free_bytes=free)  # noqa: E731
    assert [fit(free) for free in (180, 179, 140, 139, 120, 110, 109, 100, 99)] == [8, 4, 4, 2, 2, 1, 0, 0, 0]
    assert fit(180, most=3) == 2


def test_saves_copy_nothing_and_survive_donation():
    """A save is by reference; donating steps write elsewhere, and the slots keep their bits."""
    seq = start(ring_slots=3)
    points = []
    for token in (4, 5, 6):
        seq = ssm.save_ring(seq)
        points.append(host(seq.state))
        leaves = seq.backend.layout.leaves(seq.state)
        assert all(leaves[i] is plane for i, plane in seq.saved[len(points) - 1].items())
        for _ in range(2):
            seq, _ = ssm.step(None, seq, [token, token], donate=True)
    assert seq.ring.next_slot == 0
    back = ssm.restore_ring(seq, 1)
    assert str(testing.digit_rows(back.state)) == str(testing.digit_rows(points[1]))
    assert sorted(back.saved) == [0, 1]
    refuses(sc.RollbackError, lambda: ssm.restore_ring(back, 2), back.state, "rolled back past")


def test_s26_a_save_that_fails_leaves_the_ring_as_it_was(monkeypatch):
    """S26: between the entry and the planes something fails; neither changes, and the slot keeps what it had."""
    seq, _ = ssm.step(None, ssm.save_ring(start(ring_slots=1)), [4, 4])

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(seq.backend.layout), "indices", fail)  # the entry is made, the planes are not yet taken
        with pytest.raises(MemoryError):
            ssm.save_ring(seq)
    assert [entry.position for entry in seq.ring.entries] == [3]
    same("digit", ssm.restore_ring(seq, 0), PROMPT)
    assert [entry.position for entry in ssm.save_ring(seq).ring.entries] == [4]


def test_saves_prefer_free_slots():
    """S24: an explicit slot does not make the next save evict while others are free."""
    ring = ssm.Ring(4)
    for slot in (1, 0):
        ring, _ = ring.record(slot + 5, slot)
    assert ring.next_slot == 2


def test_a_ragged_rollback_drops_saves_of_any_dropped_token():
    seq = start(prompt=[[1, 2, 3], [1, 2, 3]])
    opened, _ = ssm.verify(None, seq, [[4], [4]], num_valid=[0, 1])
    uneven = ssm.checkpoint(ssm.commit_accepted_prefix(opened, [0, 1], 1))
    level, _ = ssm.extend(None, uneven, [[5], [0]], num_valid=[1, 0])
    back = ssm.rollback(ssm.save_ring(level), 0)
    assert back.ring.entries == () and back.saved == {}
    refuses(sc.RollbackError, lambda: ssm.restore_ring(back, 0), back.state)


def test_a_ring_counts_from_the_highest_row_ever_written():
    """A window of 9 rows was dropped, but its rows were written: the checkpoint 9 back is the farthest."""
    seq = ssm.checkpoint(start())
    opened, _ = ssm.verify(None, seq, np.ones((2, 9), int))
    seq = ssm.commit_accepted_prefix(opened, 1, 9)
    same("digit", ssm.rollback(seq, 0), PROMPT)  # 9 rows below the highest: just in reach
    opened, _ = ssm.verify(None, seq, np.ones((2, 9), int))
    seq = ssm.commit_accepted_prefix(opened, 1, 9)
    refuses(sc.RollbackError, lambda: ssm.rollback(seq, 0), seq.state, "`ring`", "highest")


def test_a_begun_state_does_not_know_what_its_rings_were_given():
    """A dropped window of 9 rows overwrote what a boundary below the length needs; without `highest`, refused."""
    text = [9, 0, 1, 2, 3, 4, 5, 0, *range(1, 9)]
    seq = start(prompt=[text])
    opened, _ = ssm.verify(None, seq, [[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    done = ssm.commit_accepted_prefix(opened, 1, 9)
    tokens = [done.tokens[0].tolist()]

    saved = {i: seq.backend.layout.leaves(seq.state)[i] for i in seq.backend.layout.indices("shift", "recurrent")}

    def begun_again(highest):
        again = ssm.begin(done.backend, done.state, tokens=tokens, ring_slots=1, highest=highest)
        return dataclasses.replace(again, ring=ssm.Ring(1).record(len(text))[0], saved={0: saved})

    unknown, told = begun_again(None), begun_again(done.highest)
    refuses(sc.RollbackError, lambda: ssm.restore_ring(unknown, 0), done.state, "`ring`", "`begin`")
    opened, _ = ssm.verify(None, ssm.checkpoint(unknown), [[1] * 9])
    same("digit", ssm.rollback(opened, 0), tokens)  # but never below the length
    same("digit", ssm.restore_ring(told, 0), [text])
    for wrong in (16, 27, [17, 17], 17.5, True):
        refuses(sc.GeometryError, lambda wrong=wrong: begun_again(wrong), done.state, "highest")


def test_a_restored_prefix_begun_again_cannot_go_below_it():
    """A slot of a prefix cache keeps the ring as it is, dropped drafts included."""
    cache = cached(num_slots=1)
    opened, _ = ssm.verify(None, start(prompt=[[1, 2, 3, 4, 5]]), [[6] * 9])
    done = ssm.commit_accepted_prefix(opened, 1, 9)
    assert cache.insert(done.state, done.tokens[0])
    empty = done.backend.init(None, batch=1, capacity=CAPACITY)
    state = cache.restore(empty, 0, cache.lookup([1, 2, 3, 4, 5, 6, 7]))
    again = ssm.begin(done.backend, state, tokens=done.tokens)
    assert again.highest.tolist() == [6 + 9]
    longer = ssm.checkpoint(ssm.step(None, again, [7])[0])
    opened, _ = ssm.verify(None, longer, [[1] * 9])
    same("digit", ssm.rollback(opened, 2), [[1, 2, 3, 4, 5, 6, 7, 1, 1]])


def test_what_going_back_shares_is_not_donated():
    """Restores, rollbacks and boundaries share attention rows with their argument, which stays usable."""
    later, _ = ssm.step(None, ssm.checkpoint(ssm.save_ring(start(ring_slots=2))), [4, 4])
    before = host(later.state)
    for back in (lambda: ssm.restore_ring(later, 0), lambda: ssm.rollback(later, 0)):
        for go_on in (
            lambda seq: ssm.step(None, seq, [5, 5], donate=True),
            lambda seq: ssm.extend(None, seq, [[5], [5]], donate=True),
            lambda seq: ssm.verify(None, seq, [[5], [5]], donate=True),
        ):
            restored = back()
            opened, _ = go_on(restored)
            assert opened.lent == ()
            assert_bits(before, later.state)
            if opened.opened is not None:
                opened = ssm.commit_accepted_prefix(opened, 1, 1, donate=True)
            assert_bits(before, later.state)
            same("digit", opened, [[1, 2, 3, 5], [3, 2, 1, 5]])
            same("digit", later, [[1, 2, 3, 4], [3, 2, 1, 4]])
    attention = begun(attention_backend(), prompt=[9, 0, 2])
    decision = ssm.plan_boundary_rollback(attention, np.arange(10) == 0, num_prompt=1, min_drop=1)
    ssm.step(None, ssm.apply_boundary_rollback(attention, decision), [5], donate=True)
    assert attention.state["kv"][0, :3].tolist() == [9, 0, 2]


def test_a_donating_step_after_going_back_is_in_place_again():
    """Only the first transition spares what is shared: the next one donates it all."""
    seq = ssm.restore_ring(ssm.save_ring(start(ring_slots=1)), 0)
    seq, _ = ssm.step(None, seq, [4, 4], donate=True)
    kv = seq.state["kv"]
    ssm.step(None, seq, [5, 5], donate=True)
    assert kv.is_deleted()


def test_ring_sizes_are_whole_numbers():
    """S30, S31: negative and fractional numbers are refused, a reserve beyond what is free gives 0."""
    with pytest.raises(sc.GeometryError, match="published"):
        ssm.choose_ring_slots(True, published=-3)
    fits = {"most": 8, "bytes_per_slot": 5, "reserved_bytes": 0, "free_bytes": 100}
    for name, wrong in (("bytes_per_slot", -5), ("free_bytes", 1.5), ("most", True), ("reserved_bytes", -1)):
        with pytest.raises(sc.GeometryError, match=name):
            ssm.fit_ring_slots(**(fits | {name: wrong}))
    assert ssm.fit_ring_slots(**fits) == 8
    # More reserved than there is, by more than any slot: 0, not a number below it.
    assert ssm.fit_ring_slots(8, bytes_per_slot=1, reserved_bytes=2**70, free_bytes=2**62) == 0
    with pytest.raises(sc.RollbackError):
        ssm.parse_ring_slots(3)


def test_s40_a_ring_is_no_occupancy():
    """S40: saves into a ring leave the occupancy of a cache as it was."""
    cache = cached(num_slots=2)
    seq = ssm.save_ring(ssm.save_ring(start(ring_slots=2)))
    assert len(seq.ring.entries) == 2 and ssm.snapshot_occupancy(cache) == (0, 2)
    ssm.step(None, ssm.restore_ring(seq, 1), [1, 1])
    assert ssm.snapshot_occupancy(cache) == (0, 2)


def test_s19_a_ring_without_recurrent_planes_keeps_nothing():
    """S19: ring operations go through and hold no arrays; the length alone goes back."""
    seq = ssm.save_ring(begun(attention_backend(), ring_slots=1))
    assert seq.saved == {0: {}}
    later, _ = ssm.extend(None, seq, [[4, 5]])
    back = ssm.restore_ring(later, 0)
    assert back.state["pos"].tolist() == [3] and back.state["kv"][0, :3].tolist() == [1, 2, 3]
    cropped = ssm.rollback(ssm.extend(None, ssm.checkpoint(seq), [[4]])[0], 0)
    assert cropped.state["pos"].tolist() == [3]

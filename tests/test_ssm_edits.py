"""Edits between a checkpoint and a window, states of NumPy, slots of patched states, and objects of another kind."""

import jax
import numpy as np
import pytest
from helpers import cases
from sequences import PROMPT, start

import statecore as sc
from statecore import ssm, store, testing
from statecore.ssm import Decline

STRATEGIES = [("digit", "select"), ("digit", "rerun"), ("digit-own", "replay")]
by_strategy = pytest.mark.parametrize(("name", "strategy"), STRATEGIES)


def spelled(seq):
    return np.array(seq.state["h"]).tolist()


@by_strategy
@pytest.mark.parametrize("donate", [False, True])
def test_s03_an_edit_after_the_checkpoint_is_taken_back_with_a_window_open(name, strategy, donate):
    """S03, S04: 0 rows are the checkpoint, not the state that was edited since; more rows are refused."""
    seq = ssm.checkpoint(start(name, strategy))
    wanted = spelled(seq)
    opened, _ = ssm.verify(cases()[name].params, ssm.patch(seq, "h", lambda h: h * 0 + 999), [[4, 5], [6, 7]])
    with pytest.raises(sc.RollbackError, match="edited or restored"):
        ssm.rollback(opened, 1)
    gone = ssm.rollback(opened, 0, donate=donate)
    assert spelled(gone) == wanted and not gone.is_patched and gone.opened is None
    again, _ = ssm.verify(cases()[name].params, ssm.checkpoint(gone), [[4, 5], [6, 7]])
    one = ssm.rollback(again, 1)
    assert spelled(one) == [value * 10 + token for value, token in zip(wanted, [4, 6], strict=True)]


def test_s03_a_ring_restored_since_is_not_the_checkpoint():
    """The reverse: the checkpoint is of the edited state, and what the ring gave back is not."""
    prompt = [[1, 2, 3], [3, 2, 1]]
    state = cases()["digit"].backend.init(None, batch=2, capacity=32)
    seq, _ = ssm.extend(None, ssm.begin(cases()["digit"].backend, state, ring_slots=2), prompt)
    edited = ssm.checkpoint(ssm.patch(ssm.save_ring(seq), "h", lambda h: h * 0 + 9))
    back = ssm.restore_ring(edited, 0)
    assert spelled(back) == [123, 321]
    opened, _ = ssm.verify(None, back, [[4, 5], [6, 7]])
    for gone in (ssm.rollback(opened, 0), ssm.rollback(back, 0)):
        assert spelled(gone) == [9, 9] and gone.is_patched
    kept = ssm.commit_accepted_prefix(ssm.verify(None, back, [[4, 5], [6, 7]])[0], 1, 2)
    assert spelled(kept) == [1234, 3216]
    # Without an edit in between, a restored state at the checkpoint is the checkpoint.
    plain = ssm.restore_ring(ssm.checkpoint(ssm.save_ring(seq)), 0)
    assert spelled(ssm.rollback(ssm.verify(None, plain, [[4, 5], [6, 7]])[0], 1)) == [1234, 3216]


def test_a_state_of_numpy_is_not_changed_behind_a_checkpoint():
    seq = start()
    raw = jax.tree.map(np.array, seq.state)
    begun = ssm.begin(seq.backend, raw, tokens=PROMPT, ring_slots=1)
    kept = ssm.checkpoint(begun)
    live, _ = ssm.step(None, kept, [4, 5])
    for leaf in jax.tree.leaves(raw):
        leaf[...] = 77
    assert spelled(ssm.rollback(live, 0)) == spelled(seq)
    wide = dict(jax.tree.map(np.array, seq.state), h=np.array([2**40, 1]))
    with pytest.raises(sc.GeometryError, match="h"):
        ssm.begin(seq.backend, wide, tokens=PROMPT)


@pytest.mark.parametrize("through", ["save", "save_rows", "copy", "compact"])
def test_a_patch_goes_with_its_slot(through):
    """No prefix cache takes what a pool gives back of a patched state; a slot claimed anew is clean."""
    seq = start()
    edited = ssm.patch(seq, "h", lambda h: h + 1)
    pool = store.SnapshotPool(seq.backend, None, num_slots=3, capacity=32)
    handle = pool.claim()
    pool.save_rows([handle, None], edited.state) if through == "save_rows" else pool.save(handle, edited.state, 0)
    if through == "copy":
        handle = pool.copy(handle)
    if through == "compact":
        (handle,) = pool.compact([handle])
    restored = pool.restore_into(seq.state, 0, handle)
    assert ssm.begin(seq.backend, restored, tokens=PROMPT).is_patched
    pool.save(handle, seq.state, 0)
    assert not ssm.begin(seq.backend, pool.restore_into(seq.state, 0, handle), tokens=PROMPT).is_patched


def test_a_plan_declines_what_no_ring_can_undo():
    """S28: what the apply would refuse is declined, and the plan changes nothing."""
    backend = testing.digit_backend()
    seq = ssm.begin(backend, backend.init(None, batch=1, capacity=32), ring_slots=2)
    seq = ssm.save_ring(ssm.extend(None, seq, [[1, 0]])[0])
    found = []
    for _ in range(11):
        seq, _ = ssm.step(None, seq, [1])
        decision = ssm.plan_boundary_rollback(seq, np.arange(10) == 0, num_prompt=0, min_drop=1)
        found.append(decision.decline)
        if decision.decline is None:
            assert ssm.apply_boundary_rollback(seq, decision).lengths.tolist() == [2]
    assert found[0] is None and found[-1] is Decline.NOT_REWINDABLE
    assert sorted(found, key=lambda reason: reason is not None) == found


def test_objects_of_another_kind():
    seq = start()
    state, backend = seq.state, seq.backend
    pool = store.SnapshotPool(backend, None, num_slots=1, capacity=32)
    calls = [
        lambda: ssm.begin(backend, state, tokens=5),
        lambda: ssm.plan("x", 3, None),
        lambda: ssm.boundary_mask(None, 4),
        lambda: store.SnapshotPool("x", None, num_slots=1),
        lambda: sc.PrefixCache("x", None, capacity=8),
        lambda: pool.compact(None),
        lambda: pool.save_rows(None, state),
    ]
    for call in calls:
        with pytest.raises(sc.GeometryError):
            call()
    with pytest.raises(sc.RollbackError):
        ssm.parse_ring_slots("\u0663")

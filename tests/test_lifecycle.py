"""The life of a run, as a table, and requests from other threads."""

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore.generation import Control, Lifecycle, Status

ALL = list(Status)
IDLE = {Status.PREPARED, Status.PAUSED}
SAVABLE = IDLE | {Status.COMPLETED}
# Operation, from where it is allowed, where it leads.
TABLE = [
    ("begin", lambda life: life.begin(), IDLE, Status.RUNNING),
    ("complete", lambda life: life.complete(num_tokens=1, is_complete=True), {Status.RUNNING}, Status.COMPLETED),
    ("go on", lambda life: life.complete(num_tokens=1, is_complete=False), {Status.RUNNING}, Status.PAUSED),
    ("interrupt", lambda life: life.interrupt(), {Status.RUNNING}, Status.PAUSED),
    ("pause", lambda life: life.pause(), IDLE, Status.PAUSED),
    ("cancel", lambda life: life.cancel(), IDLE | {Status.RUNNING}, Status.CANCELLED),
    ("fail", lambda life: life.fail(), set(ALL), Status.FAILED),
    ("checkpoint", lambda life: life.checkpoint(), SAVABLE, None),
    ("restore", lambda life: life.restore(Lifecycle(status=Status.PAUSED, prediction=2)), SAVABLE, Status.PAUSED),
    ("fork", lambda life: life.fork(), SAVABLE, None),
]


@pytest.mark.parametrize(("name", "operation", "allowed", "after"), TABLE, ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("status", ALL)
def test_nd1_the_table(name, operation, allowed, after, status):
    """ND1, ND2: each edge exactly, and an illegal one changes nothing and names both ends."""
    life = Lifecycle(status=status, prediction=3, epoch=4)
    if status in allowed:
        assert operation(life).status is (after or status)
        return
    with pytest.raises(sc.LifecycleError, match=status.value):
        operation(life)
    assert life == Lifecycle(status=status, prediction=3, epoch=4)


def test_nd3_what_a_snapshot_can_revive():
    """ND3: an earlier point revives a completed run; cancelled and failed are for good."""
    early = Lifecycle(status=Status.PAUSED, prediction=2)
    done = Lifecycle(status=Status.COMPLETED, prediction=5)
    assert done.restore(early).status is Status.PAUSED and early.restore(done).status is Status.COMPLETED
    for status in (Status.CANCELLED, Status.FAILED):
        dead = dataclasses.replace(early, status=status)
        for call in (lambda dead=dead: dead.restore(early), lambda dead=dead: early.restore(dead), dead.checkpoint):
            with pytest.raises(sc.LifecycleError):
                call()


@given(st.lists(st.sampled_from(["run", "restore", "fork"]), max_size=12))
def test_nd4_epochs_only_rise(operations):
    """ND4: one more for each restore, never rewound; a fork begins at 0."""
    life, saved, restores = Lifecycle(), Lifecycle(), 0
    for operation in operations:
        if operation == "run":
            life = life.begin().complete(num_tokens=1, is_complete=False)
        elif operation == "restore":
            life, restores = life.restore(saved), restores + 1
        else:
            assert life.fork().epoch == 0 and life.fork().prediction == life.prediction
        assert life.epoch == restores


def test_nd5_what_was_begun_and_cancelled_is_not_counted():
    """ND5: cancelling before the commit does not advance the prediction."""
    assert Lifecycle(prediction=3, status=Status.PAUSED).begin().cancel().prediction == 3
    assert Lifecycle().begin().interrupt() == Lifecycle()


def test_nd6_requests_from_other_threads():
    """ND6: a pause stays until it is acknowledged; a cancel is taken up once, by the run that runs."""
    control = Control()
    thread = threading.Thread(target=control.pause)
    thread.start()
    thread.join()
    assert control.is_pause_requested and control.is_pause_requested
    control.acknowledge()
    assert not control.is_pause_requested
    control.cancel()
    control.acknowledge()
    assert control.is_cancel_requested and control.take_cancel() and not control.take_cancel()

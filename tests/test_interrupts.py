"""Threads and interrupts: a runtime is left with the old or the new, and a slot goes to one caller."""

import sys
import threading

import jax
import numpy as np
import pytest
from helpers import assert_bits, host
from runtimes import MODES, WINDOW, interrupted_at, make

import statecore as sc
from statecore import native
from statecore.runtime import faults
from statecore.runtime._slot import Claim


def test_threads_never_interleave():
    """Three threads hammer one runtime and exchange its slots; each state spells one sequence of whole steps."""
    runtime = make(capacity=4000)
    runtime.step([0, 0], live=[True, True])
    errors, done = [], []

    def work(number: int):
        try:
            slot = None
            for turn in range(40):
                runtime.step([number, number])
                saved = runtime.capture(mode=MODES[turn % 3])
                # One operation saw one moment: length, position and planes agree.
                kv, length = np.array(saved.state["kv"])[0], int(saved.lengths[0])
                assert int(np.array(saved.state["pos"])[0]) == length
                assert np.array(saved.state["h"])[0] == np.uint32(int("".join(map(str, kv[:length]))) % 2**32).astype(
                    np.int32
                )
                slot = runtime.exchange(saved) if turn % 4 == 0 else slot
            done.append(number)
        except BaseException as error:  # raised in the main thread below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and sorted(done) == [1, 2, 3], errors


def test_one_slot_goes_to_one_of_two_runtimes():
    """Two threads exchange the same slot into two runtimes: one has it, the other is told that it is gone."""
    model = make().model
    for mode in ("fresh", "lazy") * 10:
        runtimes = [make(model=model) for _ in range(2)]
        slot = runtimes[0].capture(mode=mode)
        barrier, outcomes = threading.Barrier(2), []

        def work(runtime, barrier=barrier, slot=slot, outcomes=outcomes):
            barrier.wait()
            try:
                outcomes.append(runtime.exchange(slot))
            except sc.StateConsumedError:
                outcomes.append(None)

        threads = [threading.Thread(target=work, args=(runtime,)) for runtime in runtimes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcome is None for outcome in outcomes) == [False, True]
        for runtime in runtimes:
            runtime.step([1, 1])


@pytest.mark.parametrize(
    "operation", ["step", "verify", "commit", "capture lazy", "capture", "capture into", "exchange", "reset"]
)
def test_an_interrupt_at_any_line_leaves_the_old_or_the_new(operation):
    """Or a fence, if it came while the state was with the device. No lock stays held, and no mirror lies."""
    model, line, outcomes = make().model, 0, set()
    while True:
        line += 1
        runtime = make(model=model)
        slot = runtime.capture()
        runtime.step([5, 5])
        kept = runtime.capture(mode="lazy") if operation == "step" and line % 2 else None
        if operation == "commit":
            runtime.verify(WINDOW)
        runtime.settle()
        call = {
            "step": lambda: runtime.step([1, 2]),  # noqa: B023
            "verify": lambda: runtime.verify(WINDOW),  # noqa: B023
            "commit": lambda: runtime.commit(2),  # noqa: B023
            "capture": runtime.capture,
            "capture into": lambda: runtime.capture(into=slot),  # noqa: B023
            "capture lazy": lambda: runtime.capture(mode="lazy"),  # noqa: B023
            "exchange": lambda: runtime.exchange(slot),  # noqa: B023
            "reset": runtime.reset,
        }[operation]
        version = runtime.version
        if not interrupted_at(line, call, "statecore/runtime/_"):
            break
        free = []
        other = threading.Thread(target=lambda: free.append(runtime._lock.acquire(blocking=False)))  # noqa: B023
        other.start()
        other.join()
        assert free == [True], "the lock stayed held"
        runtime._lock = threading.RLock()  # that thread took it and is gone
        if kept is not None:
            assert np.array(kept.state["h"]).tolist() == [1235, 3215]
        if not runtime.support().is_supported:
            outcomes.add("fence")
            with pytest.raises(sc.FencedError):
                runtime.step([1, 2])
            continue
        outcomes.add("new" if runtime.version > version else "old")
        assert np.array(runtime.state["pos"]).tolist() == runtime.lengths.tolist()
        if operation == "capture into":
            assert slot.is_consumed == any(leaf.is_deleted() for leaf in jax.tree.leaves(slot.state))
        if operation == "exchange" and runtime.version == version:
            runtime.exchange(slot)
            assert runtime.lengths.tolist() == [3, 3]
        runtime.abandon()
        runtime.step([1, 2])
        runtime.exchange(runtime.capture())
    assert line > 5 and "old" in outcomes and ("new" in outcomes or operation.startswith("capture"))


@pytest.mark.parametrize("mode", ["fresh", "compact"])
def test_na22_a_slot_is_copied_into_or_exchanged_by_another_runtime_but_not_both(mode):
    """NA22: the copy holds the slot before it takes its buffers, so that nobody installs them meanwhile."""
    model, refused = make().model, []
    one, other = make(model=model), make(model=model)
    slot, before = one.capture(mode=mode), host(other.state)

    def work():
        try:
            other.exchange(slot)
        except sc.StateConsumedError as refusal:
            refused.append(refusal)

    thread = threading.Thread(target=work)
    with faults.inject("copy", thread.start):  # it waits for the copy, and finds the slot gone
        copied = one.capture(mode=mode, into=slot)
    thread.join()
    assert len(refused) == 1 and slot.is_consumed
    assert_bits(before, other.state)
    other.exchange(copied)


@pytest.mark.parametrize("stage", ["reserve", "copy", "copied"])
def test_na22_a_failed_copy_into_a_slot_leaves_it_whole_or_says_that_it_is_gone(stage):
    """NA22, NB5: before its buffers are taken it is what it was; after, it is used up and holds no budget."""
    runtime, budget = make(), native.SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(budget=budget)
    usage, saved = budget.usage, host(slot.state)
    with pytest.raises(MemoryError), faults.inject(stage, MemoryError):
        runtime.capture(into=slot, budget=budget)
    assert slot.is_consumed == (stage == "copied")
    if stage == "copied":
        with pytest.raises(sc.StateConsumedError, match="failed after"):
            runtime.exchange(slot)
        assert slot.reservation is None and budget.usage.retained_bytes == budget.usage.snapshots == 0
    else:
        assert budget.usage.retained_bytes == usage.retained_bytes and slot.reservation is not None
        assert_bits(saved, slot.state)
        runtime.exchange(slot)


def test_a_claim_is_undone_by_its_own_caller_only():
    """A caller that lost the race takes back nothing of the winner's, and leaves nothing behind."""
    use = make().capture().use
    won, lost = Claim("taken"), Claim("wanted")
    use.claim(won)
    with pytest.raises(sc.StateConsumedError, match="taken"):
        use.claim(lost)
    use.unclaim(lost)
    assert use.consumed == "taken"
    use.unclaim(won)
    assert use.consumed is None


def test_threads_over_two_runtimes_meet_errors_of_their_own_only():
    """A slot that another thread took is consumed, never a buffer that is gone."""
    model, wrong = make().model, []
    runtimes = [make(model=model) for _ in range(2)]
    slots = [runtimes[0].capture() for _ in range(2)]

    def work(runtime, number):
        for _ in range(40):
            try:
                source = slots[number % 2]
                slots[number % 2] = runtime.copy(source, into=slots[1 - number % 2])
            except (sc.StateConsumedError, sc.AliasError):
                slots[number % 2] = runtime.capture()
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(runtimes[i % 2], i // 2)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

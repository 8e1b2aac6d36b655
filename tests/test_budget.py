"""Budgets: what is admitted, what is refused, what is given back."""

import copy
import gc
import threading

import jax
import numpy as np
import pytest
from helpers import CAPACITY, assert_bits, cases, host
from hypothesis import given
from hypothesis import strategies as st
from runtimes import interrupted_at

import statecore as sc
from statecore import native
from statecore.native import SnapshotBudget, SnapshotUsage
from statecore.runtime import faults

MOST = 2**63 - 1


def cost(retained: int = 10, copied: int = 10) -> sc.Estimate:
    return sc.Estimate(retained_bytes=retained, copy_bytes=copied)


def make_runtime() -> sc.Runtime:
    runtime = sc.Runtime(sc.load((cases()["digit"].backend, None)), batch=2, capacity=CAPACITY)
    runtime.extend([[1, 2, 3], [3, 2, 1]])
    return runtime


LIMITS = {
    "snapshot count": ("max_snapshots", {"snapshots": 1}),
    "branch count": ("max_branches", {"branches": 1}),
    "retained bytes": ("retained_bytes", {}),
    "cumulative copy bytes": ("cumulative_copy_bytes", {}),
}


def test_nb1_unknown_overflow_and_limit_leave_the_usage():
    """NB1: each refusal names its reason, and the usage is what it was."""
    budget = SnapshotBudget(sc.SnapshotLimits(max_snapshots=1))
    held = budget.reserve(cost(), snapshots=1)
    before = budget.usage
    refused = [
        ("unknown", None, {}),
        ("unknown", cost(), {"growth": None}),
        ("overflow", cost(retained=MOST), {}),
        ("overflow", cost(copied=MOST), {}),
        ("overflow", cost(), {"growth": MOST - 15}),
        ("overflow", cost(retained=-1), {}),
        ("snapshot count", cost(), {"snapshots": 1}),
    ]
    for reason, estimate, options in refused:
        with pytest.raises(sc.BudgetError, match=reason):
            budget.reserve(estimate, **options)
        assert budget.usage == before and held.is_alive
    budget.reserve(cost(retained=MOST - 10, copied=MOST - 10)).release()


@pytest.mark.parametrize("first", range(5))
def test_nb2_the_order_of_checks(first):
    """NB2: unknown, then overflow, then snapshots, branches, retained, copy: the first that fails is named."""
    names = list(LIMITS)
    limits = sc.SnapshotLimits(**{LIMITS[name][0]: 0 for name in names[first:]})
    wanted = {"snapshots": 1, "branches": 1}
    budget = SnapshotBudget(limits)
    if first == len(names):
        return budget.reserve(cost(), **wanted).release()
    with pytest.raises(sc.BudgetError, match=names[first]):
        budget.reserve(cost(), **wanted)
    with pytest.raises(sc.BudgetError, match="overflow"):
        budget.reserve(cost(retained=MOST + 1), **wanted)
    with pytest.raises(sc.BudgetError, match="unknown"):
        budget.reserve(None, **wanted)
    assert budget.usage == SnapshotUsage()


def test_nb3_a_provisional_reservation_counts_bytes_only():
    """NB3: what a restore reserves is neither snapshot nor branch, and ends with its block."""
    budget = SnapshotBudget(sc.SnapshotLimits(max_snapshots=0, max_branches=0))
    with budget.reserve(cost(7, 9)):
        assert budget.usage == SnapshotUsage(retained_bytes=7, cumulative_copy_bytes=9)
    assert budget.usage == SnapshotUsage(cumulative_copy_bytes=9)


def test_nb4_the_last_handle_gives_back_and_copies_stay_counted():
    """NB4: retained bytes go when the last reference does; copied bytes never."""
    budget = SnapshotBudget(sc.SnapshotLimits())
    with budget.reserve(cost(), snapshots=1) as first:
        first.keep()
    second = first
    del first
    gc.collect()
    assert budget.usage == SnapshotUsage(snapshots=1, retained_bytes=10, cumulative_copy_bytes=10)
    del second
    gc.collect()
    assert budget.usage == SnapshotUsage(cumulative_copy_bytes=10)


def test_nb4_a_slot_holds_its_reservation():
    """NB4: through `Runtime.capture(budget=)`; a copied handle of the slot is charged nothing."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits(max_snapshots=2))
    size = runtime.estimate().retained_bytes
    slot, other = runtime.capture(budget=budget), runtime.capture(budget=budget)
    assert budget.usage == SnapshotUsage(snapshots=2, retained_bytes=2 * size, cumulative_copy_bytes=2 * size)
    before, version = host(runtime.state), runtime.version
    with pytest.raises(sc.BudgetError, match="snapshot count"):
        runtime.capture(budget=budget)
    with pytest.raises(sc.BudgetError, match="snapshot count"):
        runtime.copy(slot, budget=budget)
    assert_bits(before, runtime.state)
    assert runtime.version == version and budget.usage.cumulative_copy_bytes == 2 * size
    assert copy.deepcopy(slot).reservation is None
    del slot
    gc.collect()
    assert budget.usage == SnapshotUsage(snapshots=1, retained_bytes=size, cumulative_copy_bytes=2 * size)
    del other
    gc.collect()
    assert budget.usage.retained_bytes == 0


@pytest.mark.parametrize("stage", ["copy", "copied"])
def test_nb5_a_failed_copy_keeps_its_charge(stage):
    """NB5: an admitted copy that fails gives back what it would retain; the attempt stays counted."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits(max_snapshots=1))
    size = runtime.estimate().copy_bytes
    before = host(runtime.state)
    with pytest.raises(MemoryError), faults.inject(stage, MemoryError()):
        runtime.capture(budget=budget)
    gc.collect()
    assert budget.usage == SnapshotUsage(cumulative_copy_bytes=size)
    assert_bits(before, runtime.state)
    slot = runtime.capture(budget=budget)
    assert_bits(before, slot.state)
    assert budget.usage == SnapshotUsage(snapshots=1, retained_bytes=size, cumulative_copy_bytes=2 * size)


@pytest.mark.parametrize("name", list(LIMITS))
def test_nb6_zero_allows_none_and_a_restore_rewinds_nothing(name):
    """NB6: a limit of 0; and the usage lives outside of what is exchanged."""
    field, wanted = LIMITS[name]
    with pytest.raises(sc.BudgetError, match=name):
        SnapshotBudget(sc.SnapshotLimits(**{field: 0})).reserve(cost(), **wanted)
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(budget=budget)
    again = runtime.copy(slot, budget=budget)
    usage = budget.usage
    runtime.exchange(slot)
    assert budget.usage == usage and again.reservation is not None
    for bad in (-1, 1.5, True):
        with pytest.raises(sc.BudgetError, match=field):
            SnapshotBudget(sc.SnapshotLimits(**{field: bad}))


def test_nb7_a_reservation_goes_with_its_state():
    """NB7: into the runtime on exchange, on through steps, and out again; the root is not charged."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits())
    size = runtime.estimate().retained_bytes
    child = runtime.capture(budget=budget)
    reservation = child.reservation
    root = runtime.exchange(child)
    assert root.reservation is None and child.reservation is None
    runtime.step([1, 2])
    runtime.verify([[1, 2], [3, 4]])
    runtime.commit(1)
    del root
    gc.collect()
    assert budget.usage.retained_bytes == size and reservation.is_alive
    back = runtime.exchange(runtime.capture())
    assert back.reservation is reservation
    runtime.exchange(back)
    del back, reservation, child
    gc.collect()
    assert budget.usage.retained_bytes == size
    runtime.reset()
    gc.collect()
    assert budget.usage.retained_bytes == 0


def test_nb4_a_pooled_slot_is_paid_for_once():
    """NB4: `into=` passes the reservation on; only the copy is new. A dead handle holds nothing."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits(max_snapshots=1))
    size = runtime.estimate().retained_bytes
    slots = [runtime.capture(budget=budget)]
    for number in range(1, 4):
        slots.append(runtime.capture(into=slots[-1], budget=budget))
        assert budget.usage == SnapshotUsage(
            snapshots=1, retained_bytes=size, cumulative_copy_bytes=(number + 1) * size
        )
    other = SnapshotBudget(sc.SnapshotLimits())
    slots.append(runtime.capture(into=slots[-1], budget=other))
    gc.collect()
    assert budget.usage.retained_bytes == 0 and other.usage.retained_bytes == size


def test_nb8_growth_is_retained_and_not_copied():
    """NB8: what a branch may grow to counts among retained bytes, never among copied ones."""
    budget = SnapshotBudget(sc.SnapshotLimits(retained_bytes=100, cumulative_copy_bytes=10))
    branch = budget.reserve(cost(), branches=1, growth=90)
    assert budget.usage == SnapshotUsage(branches=1, retained_bytes=100, cumulative_copy_bytes=10)
    branch.release()
    assert budget.usage == SnapshotUsage(cumulative_copy_bytes=10)
    with pytest.raises(sc.BudgetError, match="retained bytes"):
        budget.reserve(cost(copied=0), branches=1, growth=91)


def test_nb9_unknown_growth_refuses_the_branch_and_not_the_snapshot():
    """NB9: past the capacity there is no growth to reserve; the same slot is still captured and installed."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(budget=budget)
    growth = runtime.estimate_growth(slot, CAPACITY)
    assert growth is None
    with pytest.raises(sc.BudgetError, match="grow to is unknown"):
        budget.reserve(runtime.estimate(slot), branches=1, growth=growth)
    assert_bits(host(slot.state), runtime.copy(slot, budget=budget).state)
    runtime.exchange(slot)


def test_an_unknown_cost_is_refused_without_any_limit():
    """NB1, NA1, NA2: int4 planes have no known size, so that nothing is copied, budget or not."""
    import jax.numpy as jnp

    from statecore import planes as pl

    backend = sc.Backend(
        name="narrow",
        init=lambda params, batch, capacity: {"h": jnp.zeros(batch, jnp.int4), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: (
            {"h": state["h"], "pos": state["pos"] + 1},
            jnp.zeros((tokens.shape[0], 4)),
        ),
        planes={"h": pl.recurrent(), "pos": pl.position()},
    )
    runtime = sc.Runtime(sc.load((backend, None)), capacity=8)
    runtime.step([1])
    assert runtime.estimate() is None
    assert not runtime.support().is_supported and "`h` (int4[1])" in runtime.support().reason
    for options in ({}, {"budget": SnapshotBudget(sc.SnapshotLimits())}, {"mode": "lazy"}, {"mode": "compact"}):
        with pytest.raises(sc.BudgetError, match="unknown.*`h`"):
            runtime.capture(**options)
    with pytest.raises(sc.BudgetError, match="unknown"):
        runtime.replace_state(runtime.state)
    runtime.step([1])
    assert runtime.lengths.tolist() == [2]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=30))
def test_the_usage_is_the_sum_of_what_lives(operations):
    """NB1, NB4: against a list of what is alive, over any sequence of reservations and releases."""
    limits = sc.SnapshotLimits(max_snapshots=3, max_branches=2, retained_bytes=100, cumulative_copy_bytes=300)
    budget, alive, copied = SnapshotBudget(limits), [], 0
    for choice, retained, moved, is_snapshot in operations:
        if choice > 3 and alive:
            alive.pop(choice % len(alive))[0].release()
        else:
            kind = {"snapshots": 1} if is_snapshot else {"branches": 1}
            counts = [sum(entry[1] == is_snapshot for entry in alive) + 1, sum(entry[2] for entry in alive) + retained]
            fits = counts[0] <= (3 if is_snapshot else 2) and counts[1] <= 100 and copied + moved <= 300
            try:
                reservation = budget.reserve(cost(retained, moved), **kind)
            except sc.BudgetError:
                assert not fits
            else:
                assert fits
                alive.append((reservation, is_snapshot, retained))
                copied += moved
        assert budget.usage == SnapshotUsage(
            snapshots=sum(entry[1] for entry in alive),
            branches=sum(not entry[1] for entry in alive),
            retained_bytes=sum(entry[2] for entry in alive),
            cumulative_copy_bytes=copied,
        )


def test_threads_share_a_budget():
    """Many threads reserve and drop at once; nothing is lost of the counts."""
    budget = SnapshotBudget(sc.SnapshotLimits(max_snapshots=3))
    admitted = []

    def work():
        for _ in range(300):
            try:
                with budget.reserve(cost(1, 1), snapshots=1):
                    assert 1 <= budget.usage.snapshots <= 3
                    admitted.append(1)
            except sc.BudgetError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.usage == SnapshotUsage(cumulative_copy_bytes=len(admitted)) and len(admitted) > 300


def test_a_compact_capture_is_charged_what_it_takes():
    """NB1: its own bytes, and the copy to full capacity on `copy`."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(mode="compact", budget=budget)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(slot.state))
    assert size < runtime.estimate().retained_bytes
    assert budget.usage == SnapshotUsage(snapshots=1, retained_bytes=size, cumulative_copy_bytes=size)
    whole = runtime.copy(slot, budget=budget)
    added = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.state))
    assert added == runtime.estimate(slot).copy_bytes == runtime.estimate().copy_bytes
    assert budget.usage.retained_bytes == size + added
    assert native.logical_bytes(runtime.geometry.layout, whole.state) == runtime.estimate().logical_bytes
    np.testing.assert_array_equal(whole.lengths, slot.lengths)


@pytest.mark.parametrize("operation", ["reserve", "give back"])
def test_nb4_an_interrupt_at_any_line_leaks_nothing(operation):
    """NB4: what was interrupted is counted and given back together, or never counted."""
    line = 0
    while True:
        line += 1
        budget = SnapshotBudget(sc.SnapshotLimits())
        held = budget.reserve(cost(), snapshots=1)
        if operation == "give back":
            del held
        call = (lambda: budget.reserve(cost(), snapshots=1)) if operation == "reserve" else (lambda: budget.usage)  # noqa: B023
        if not interrupted_at(line, call, "native/_budget.py"):
            break
        left = 1 if operation == "reserve" else 0
        assert budget.usage.snapshots == left and budget.usage.retained_bytes == 10 * left
    assert line > 4


def test_nb7_an_exchange_of_a_compact_slot_reserves_what_it_grows():
    """NB7, NB4: bytes held are bytes counted; without room for them nothing changes."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(mode="compact", budget=budget)
    size = budget.usage.retained_bytes
    back = runtime.exchange(runtime.exchange(slot))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(back.state))
    assert whole > size and back.reservation.held == SnapshotUsage(snapshots=1, retained_bytes=whole)
    assert budget.usage == SnapshotUsage(snapshots=1, retained_bytes=whole, cumulative_copy_bytes=size + whole)
    del slot, back
    gc.collect()
    assert budget.usage == SnapshotUsage(cumulative_copy_bytes=size + whole)


@pytest.mark.parametrize("limit", ["retained_bytes", "cumulative_copy_bytes"])
def test_nb1_a_compact_slot_that_may_not_grow_is_not_exchanged(limit):
    """NB1, NB7: refused before anything is copied; slot, state and usage are what they were."""
    runtime = make_runtime()
    size = runtime.capture(mode="compact", budget=SnapshotBudget(sc.SnapshotLimits())).reservation.held.retained_bytes
    budget = SnapshotBudget(sc.SnapshotLimits(**{limit: size + 8}))
    slot = runtime.capture(mode="compact", budget=budget)
    usage, version, saved = budget.usage, runtime.version, host(slot.state)
    with pytest.raises(sc.BudgetError, match=limit.replace("_", " ")):
        runtime.exchange(slot)
    assert budget.usage == usage and runtime.version == version and not slot.is_consumed
    assert_bits(saved, slot.state)


def test_nb5_what_is_refused_is_not_charged():
    """NB5: a copy into itself, and planes that are gone, are refused before a budget counts an attempt."""
    runtime, budget = make_runtime(), SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(budget=budget)
    usage = budget.usage
    with pytest.raises(sc.AliasError):
        runtime.copy(slot, into=slot, budget=budget)
    assert budget.usage == usage and not slot.is_consumed
    runtime.state["h"].delete()
    for mode in ("fresh", "lazy", "compact"):
        with pytest.raises(sc.StateConsumedError, match="`h` of this installed state"):
            runtime.capture(mode=mode, budget=budget)
    with pytest.raises(sc.StateConsumedError, match="`h`"):
        runtime.exchange(slot)
    assert budget.usage == usage and runtime.support().is_supported
    runtime.reset()
    runtime.exchange(slot)


@pytest.mark.parametrize("options", [{"snapshots": -5}, {"branches": -1}, {"snapshots": 1.5}, {"branches": True}])
def test_nb1_a_reservation_is_of_whole_numbers(options):
    """NB1: nothing can be reserved that would give room back."""
    budget = SnapshotBudget(sc.SnapshotLimits())
    with pytest.raises(sc.BudgetError, match="whole number"):
        budget.reserve(cost(), **options)
    assert budget.usage == SnapshotUsage()

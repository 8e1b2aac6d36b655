"""Native state through a runtime, by the ids of the seed: capture, copy, validate, exchange, fence."""

import dataclasses
import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, CASE_NAMES, assert_bits, cases, host
from runtimes import MODES, WINDOW, busy, late_runtime, make, pointers, slowly

import statecore as sc
from statecore import native, ssm
from statecore import state as states
from statecore.runtime import _fit, faults
from statecore.state import is_marked


def test_na1_support_is_a_fact_without_effect():
    """NA1: true for a healthy runtime, open window or not; a fenced one says why it is not."""
    runtime = make()
    before, version = host(runtime.state), runtime.version
    assert runtime.support() == type(runtime.support())(is_supported=True)
    assert_bits(before, runtime.state)
    assert runtime.version == version
    runtime.verify(WINDOW)
    assert runtime.support().is_supported
    runtime._fence = RuntimeError("lost")
    assert not runtime.support().is_supported and "lost" in runtime.support().reason


@pytest.mark.parametrize("operation", ["settle", "capture", "copy", "validate", "exchange", "estimate", "growth"])
def test_na3_na20_na24_late_errors_fence_with_the_first_cause(operation):
    """NA3, NA13, NA20, NA24: results in flight are awaited; a late error is found by whoever needs them good."""
    runtime = late_runtime()
    runtime.step([1])
    slot = runtime.capture()
    jax.block_until_ready(slowly(runtime.model.params))  # compiled
    busy(runtime)
    logits = runtime.step([9])  # an output handle is no proof
    assert runtime.support().is_supported and logits.shape == (1, 10)
    call = {
        "settle": runtime.settle,
        "capture": runtime.capture,
        "copy": lambda: runtime.copy(slot),
        "validate": lambda: runtime.validate(slot),
        "exchange": lambda: runtime.exchange(slot),
        "estimate": runtime.estimate,
        "growth": lambda: runtime.estimate_growth(slot, 1),
    }[operation]
    with pytest.raises(sc.FencedError, match="gave up late"):
        call()
    for later in (call, lambda: runtime.exchange(slot), runtime.reset, lambda: runtime.step([1])):
        with pytest.raises(sc.FencedError, match="gave up late"):
            later()
    assert not slot.is_consumed
    healthy = sc.Runtime(runtime.model, capacity=8)
    healthy.exchange(slot)
    healthy.step([2])
    assert np.array(healthy.state["h"]).tolist() == [12]


def test_na3_an_estimate_of_a_busy_runtime_is_refused():
    """NA3: an open window is an error, never a stale number."""
    runtime = make()
    runtime.verify(WINDOW)
    for call in (runtime.estimate, lambda: runtime.estimate_growth(None, 1)):
        with pytest.raises(sc.LifecycleError, match="window"):
            call()


@pytest.mark.parametrize("name", CASE_NAMES)
def test_na12_a_capture_shares_no_buffer(name):
    """NA12, NA13: other buffers than the installed state, complete, and unchanged by what follows."""
    runtime = make(name)
    slots = {mode: runtime.capture(mode=mode) for mode in MODES}
    before = {mode: host(slot.state) for mode, slot in slots.items()}
    assert slots["fresh"].is_settled and slots["compact"].is_settled and not slots["lazy"].is_settled
    for mode in ("fresh", "compact"):
        assert set(pointers(slots[mode].state)).isdisjoint(pointers(runtime.state))
    assert pointers(slots["lazy"].state) == pointers(runtime.state)
    runtime.verify(WINDOW, num_valid=[4, 2])
    runtime.commit([3, 1])
    assert slots["lazy"].is_settled
    for _ in range(3):
        runtime.step([1, 2])
    for mode, slot in slots.items():
        assert_bits(before[mode], slot.state)
        assert set(pointers(slot.state)).isdisjoint(pointers(runtime.state))


OPERATIONS = {
    "capture": (lambda runtime, slot: runtime.capture(), ["estimate", "copy", "copied"]),
    "capture compact": (lambda runtime, slot: runtime.capture(mode="compact"), ["estimate", "copy", "copied"]),
    "capture lazy": (lambda runtime, slot: runtime.capture(mode="lazy"), ["estimate", "copy", "copied"]),
    "copy": (lambda runtime, slot: runtime.copy(slot), ["estimate", "reserve", "copy", "copied"]),
    "estimate": (lambda runtime, slot: runtime.estimate(), ["estimate", "settle"]),
    "validate": (lambda runtime, slot: runtime.validate(slot), ["settle"]),
    "exchange": (lambda runtime, slot: runtime.exchange(slot), ["settle", "exchange"]),
    "replace": (lambda runtime, slot: runtime.replace_state(runtime.state), ["estimate", "copy", "copied"]),
    "step": (lambda runtime, slot: runtime.step([1, 2]), ["dispatch"]),
    "extend": (lambda runtime, slot: runtime.extend(WINDOW), ["dispatch"]),
    "verify": (lambda runtime, slot: runtime.verify(WINDOW), ["dispatch"]),
}


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name, (_, stages) in OPERATIONS.items() for stage in stages]
)
def test_na14_na22_na25_a_fault_at_any_stage_changes_nothing(name, stage):
    """NA14, NA22, NA25: everything bit-identical, no fence, and the same call then succeeds exactly."""
    runtime = make()
    runtime.step([5, 6])  # the first of its kind is settled at once
    slot = runtime.capture()
    runtime.step([5, 6])  # in flight, so that there is something to settle
    if stage != "settle":
        runtime.settle()
    before, saved = host(runtime.state), host(slot.state)
    version, lengths = runtime.version, runtime.lengths.tolist()
    run = OPERATIONS[name][0]
    with pytest.raises(RuntimeError, match="on purpose"), faults.inject(stage, RuntimeError("on purpose")):
        run(runtime, slot)
    assert runtime.support().is_supported and not slot.is_consumed
    assert (runtime.version, runtime.lengths.tolist()) == (version, lengths)
    assert_bits(before, runtime.state)
    assert_bits(saved, slot.state)
    run(runtime, slot)
    assert slot.is_consumed == (name == "exchange")
    if name == "exchange":
        assert_bits(saved, runtime.state)
    runtime.abandon()
    runtime.exchange(runtime.capture())


def test_a_fault_that_is_never_reached_is_an_error():
    """A fault hook cannot make a test that tests nothing, nor outlive its block, nor meet another thread."""
    runtime = make()
    with pytest.raises(sc.LifecycleError, match="never reached"), faults.inject("no such stage", MemoryError):
        runtime.capture()
    with pytest.raises(MemoryError), faults.inject("copy", MemoryError, after=1):
        runtime.capture()
        runtime.capture()
    done = []
    with pytest.raises(MemoryError), faults.inject("copy", MemoryError):
        other = threading.Thread(target=lambda: done.append(runtime.capture()))
        other.start()
        other.join()
        runtime.capture()
    assert len(done) == 1
    struck = []
    with faults.inject("copy", lambda: struck.append(1)):
        runtime.capture()
    assert struck == [1]
    runtime.capture()


def test_na15_a_slot_is_copied_any_number_of_times():
    """NA15: the source stays as it is and usable, also while another state is installed."""
    runtime = make()
    slot = runtime.capture()
    saved = host(slot.state)
    runtime.extend(WINDOW)
    held = runtime.exchange(runtime.capture())
    copies = [runtime.copy(slot) for _ in range(3)]
    copies.append(runtime.copy(slot, into=copies.pop()))
    for copied in copies:
        assert_bits(saved, copied.state)
        assert set(pointers(copied.state)).isdisjoint(pointers(slot.state))
        runtime.exchange(copied)
        runtime.step([1, 1])
    assert_bits(saved, slot.state)
    runtime.exchange(slot)
    runtime.exchange(held)


def test_na16_the_order_of_validation():
    """NA16: health, idleness, support, identity, geometry: with all wrong, the first is named; then the next."""
    runtime = make()
    foreign = sc.Runtime(sc.load((cases()["digit"].backend, None)), batch=1, capacity=CAPACITY).capture()
    before = host(runtime.state)
    runtime.verify(WINDOW)
    runtime._fence, runtime._unsupported = RuntimeError("lost"), "no reason"
    with pytest.raises(sc.FencedError):
        runtime.validate(foreign)
    runtime._fence = None
    with pytest.raises(sc.LifecycleError):
        runtime.validate(foreign)
    runtime.abandon()
    with pytest.raises(sc.UnsupportedError, match="no reason"):
        runtime.validate(foreign)
    runtime._unsupported = ""
    with pytest.raises(sc.IdentityError):
        runtime.validate(foreign)
    own = dataclasses.replace(foreign, identity=runtime.identity)
    with pytest.raises(sc.GeometryError) as refusal:
        runtime.validate(own)
    for path in ("h", "conv", "kv", "ring", "pos"):
        assert f"`{path}`" in str(refusal.value)  # every mismatch by its path, in one error
    assert sc.equal(runtime.model.backend, runtime.state, before)


def test_na17_na23_another_load_is_refused_and_poisons_nothing():
    """NA17, NA23: equal functions and weights, loaded again, are another identity; both runs go on."""
    left, right = make(), make()
    slot = right.capture()
    with pytest.raises(sc.IdentityError, match="another load"):
        left.exchange(slot)
    assert left.support().is_supported and not slot.is_consumed
    left.step([1, 2])
    right.exchange(slot)
    right.step([1, 2])
    assert sc.equal(left.model.backend, left.state, right.state)


def test_na18_what_is_sealed_is_checked_all_the_same():
    """NA18: structure, shapes, dtypes, lengths: a slot that fitted once and was changed by hand is looked at anew."""
    runtime = make()
    slot = runtime.capture()
    runtime.validate(slot)
    for path, leaf, match in (
        ("h", slot.state["h"].astype(jnp.int16), "`h`"),
        ("kv", jnp.zeros((2, CAPACITY + 1), jnp.int32), "`kv`"),
        ("absent", jnp.zeros(2), "`absent`"),
        ("more", jnp.zeros(2), "`more`"),
        ("pos", jnp.array([3, 4], jnp.int32), "position plane `pos`"),
    ):
        changed = dict(slot.state)
        slot.state[path] = leaf
        with pytest.raises(sc.GeometryError, match=match):
            runtime.exchange(slot)
        slot.state.clear()
        slot.state.update(changed)
        runtime.validate(slot)
    with pytest.raises(sc.GeometryError, match="position plane"):
        runtime.validate(dataclasses.replace(slot, lengths=np.array([3, 2])))
    with pytest.raises(ValueError, match="read-only"):
        slot.lengths[0] = 7
    moved = dict(slot.state)
    slot.state["h"], slot.state["pos"] = slot.state["pos"], slot.state["h"]
    with pytest.raises(sc.GeometryError, match="position plane"):
        runtime.validate(slot)
    slot.state.update(moved)
    runtime.exchange(slot)


def test_na19_other_weights_invalidate_slots():
    """NA19: each replacement is an epoch of its own, also two from one model."""
    runtime = make("decay")
    params = jax.tree.map(lambda leaf: leaf * 0.5, runtime.model.params)
    newer, other = runtime.model.with_params(params), runtime.model.with_params(params)
    slots = [make("decay", model).capture() for model in (runtime.model, newer, other)]
    for model, own in zip((runtime.model, newer, other), slots, strict=True):
        runtime = make("decay", model)
        for slot in slots:
            if slot is own:
                runtime.validate(slot)
                continue
            with pytest.raises(sc.IdentityError, match="other weights"):
                runtime.validate(slot)


def test_na21_exchange_moves_no_buffer_and_launches_nothing(monkeypatch):
    """NA21: all leaves and what goes with them swap, by reference; twice is as it was."""
    runtime = make()
    runtime.replace_state(runtime.state)  # marked as patched
    runtime.settle()
    slot = runtime.capture()
    runtime.reset()
    runtime.settle()
    there, here = pointers(slot.state), pointers(runtime.state)

    def forbidden(*args, **options):
        raise AssertionError("an exchange went to the device")

    from jax._src import core

    with monkeypatch.context() as patched:
        patched.setattr(core.Primitive, "bind", forbidden)
        held = runtime.exchange(slot)
        assert (pointers(runtime.state), pointers(held.state)) == (there, here)
        assert (runtime.lengths.tolist(), held.lengths.tolist()) == ([3, 3], [0, 0])
        assert (runtime.is_patched, held.is_patched) == (True, False)
        back = runtime.exchange(held)
    assert (pointers(runtime.state), pointers(back.state)) == (here, there)
    assert (runtime.is_patched, back.is_patched) == (False, True)
    assert held.is_consumed and slot.is_consumed and not back.is_consumed


def test_na26_a_late_commit_is_not_taken_for_a_newer_window():
    """NA26: a window serves once; a duplicate that names its version is refused and changes nothing."""
    runtime = make()
    runtime.verify(WINDOW)
    first = runtime.version
    runtime.commit(2, version=first)
    with pytest.raises(sc.LifecycleError, match="No window"):
        runtime.commit(2, version=first)
    runtime.verify(WINDOW)
    with pytest.raises(sc.LifecycleError, match="committed before"):
        runtime.commit(2, version=first)
    runtime.commit(1, version=runtime.version)
    assert runtime.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31])
def test_na27_na28_copies_keep_position_capacity_and_absence(mode, num_tokens):
    """NA27, NA28: rings past their wrap and rows past the position; absent stays absent; bucket edges."""
    runtime = sc.Runtime(sc.load((cases()["digit"].backend, None)), batch=2, capacity=CAPACITY)
    for number in range(num_tokens):
        runtime.step([number % 10, (number + 1) % 10], live=[True, number % 3 == 0])
    before = host(runtime.state)
    slot = runtime.capture(mode=mode)
    assert slot.state["absent"] is None
    if mode != "compact":
        assert_bits(before, slot.state)  # whole, with what cannot be read
    runtime.exchange(slot)
    assert runtime.state["kv"].shape == (2, CAPACITY)
    assert sc.equal(runtime.model.backend, runtime.state, before)
    runtime.extend(WINDOW)
    wanted, _ = sc.extend(runtime.model.backend, None, jax.tree.map(jnp.array, before), WINDOW)
    assert sc.equal(runtime.model.backend, runtime.state, wanted)


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_na29_every_plane_matters(name, mode):
    """NA29: a change in any plane of a slot, where it can be read, is seen after it is installed."""
    runtime = make(name)
    before = host(runtime.state)
    layout = runtime.geometry.layout
    for index, (path, plane) in enumerate(zip(layout.paths, layout.planes, strict=True)):
        if plane.kind == "position":
            continue  # held against the lengths, see NA18
        slot = runtime.capture(mode=mode)
        leaves = layout.leaves(slot.state)
        # The newest row is 2 tokens in, for every plane that has rows.
        row = [0] * leaves[index].ndim
        if plane.axis is not None:
            row[plane.axis] = 2
        leaves[index] = leaves[index].at[tuple(row)].add(1)
        runtime.exchange(dataclasses.replace(slot, state=layout.unflatten(leaves)))
        assert sc.differing_planes(runtime.model.backend, runtime.state, before) == (path,)
        runtime.replace_state(jax.tree.map(jnp.array, before))


@pytest.mark.parametrize("name", CASE_NAMES)
def test_only_live_rows_advance(name):
    """Rows that are not live keep every readable bit, also at their capacity; room is theirs alone to lack."""
    runtime = make(name)
    case = cases()[name]
    alone = [sc.take_rows(case.backend, runtime.state, [row]) for row in range(2)]
    rng = np.random.default_rng(0)
    for turn in range(CAPACITY - 3):
        tokens = rng.integers(0, case.vocab_size, 2)
        live = [True, bool(turn % 3 == 0)]
        logits = np.array(runtime.step([tokens[0], tokens[1] if live[1] else -5], live=live))
        for row in range(2):
            assert np.isnan(logits[row]).all() == (not live[row])
            if live[row]:
                alone[row], _ = sc.step(case.backend, case.params, alone[row], tokens[row : row + 1])
    for row in range(2):
        assert sc.equal(case.backend, sc.take_rows(case.backend, runtime.state, [row]), alone[row])
    with pytest.raises(sc.CapacityError, match="sequence 0"):
        runtime.step([1, 1], live=[True, True])
    runtime.step([1, 1], live=[False, True])  # the other has room
    version = runtime.version
    for bad in ([True], [1, 0], [[True, True]], True):
        with pytest.raises(sc.GeometryError, match="live"):
            runtime.step([1, 1], live=bad)
    with pytest.raises(sc.GeometryError, match="vocabulary"):
        runtime.step([1, -1], live=[False, True])
    assert runtime.version == version
    before = host(runtime.state)
    runtime.step([1, 1], live=[False, False])
    assert sc.equal(case.backend, runtime.state, before)


def test_a_patched_state_says_so_wherever_it_goes():
    """Capture, copy, exchange and transitions carry the mark; only `reset` clears it."""
    runtime = make()
    plain = runtime.capture()
    edited = runtime.state | {"h": runtime.state["h"] + 5}
    runtime.replace_state(edited)
    assert not edited["h"].is_deleted() and set(pointers(edited)).isdisjoint(pointers(runtime.state))
    runtime.step([1, 2])
    runtime.verify(WINDOW)
    runtime.commit(1)
    slots = [runtime.capture(mode=mode) for mode in MODES]
    slots.append(runtime.copy(slots[0]))
    slots.append(runtime.copy(slots[2]))
    assert runtime.is_patched and all(slot.is_patched for slot in slots) and not plain.is_patched
    held = runtime.exchange(plain)
    assert held.is_patched and not runtime.is_patched
    runtime.exchange(slots[2])
    assert runtime.is_patched
    runtime.replace_state(runtime.state, is_patched=False)
    assert runtime.is_patched
    runtime.reset()
    assert not runtime.is_patched
    stored = sc.capture(held.state)
    runtime.replace_state(stored, is_patched=False, lengths=held.lengths)
    assert not runtime.is_patched and runtime.lengths.tolist() == held.lengths.tolist()
    runtime.step([1, 2])


def test_replace_state_refuses_what_does_not_fit():
    runtime = make()
    before, version = host(runtime.state), runtime.version
    fine = sc.capture(runtime.state)
    gone = sc.capture(fine)
    gone["h"].delete()
    for error, state, match in (
        (sc.GeometryError, fine | {"h": fine["h"].astype(jnp.int16)}, "`h`"),
        (sc.GeometryError, fine | {"pos": fine["pos"] + 1}, "`pos`"),
        (sc.GeometryError, {"h": fine["h"]}, "missing"),
        (sc.StateConsumedError, gone, "`h`"),
        (sc.AliasError, fine | {"pos": fine["pos"], "h": fine["pos"]}, "same buffer"),
    ):
        with pytest.raises(error, match=match):
            runtime.replace_state(state)
        assert_bits(before, runtime.state)
    assert runtime.version == version
    runtime.verify(WINDOW)
    with pytest.raises(sc.LifecycleError):
        runtime.replace_state(fine)


def test_settling_waits_and_says_so():
    """`settle` returns once the state is complete; a second call has nothing to wait for."""
    runtime = late_runtime()
    runtime.step([1])
    busy(runtime)
    runtime.step([2])
    assert not runtime._installed.is_settled
    runtime.settle()
    assert runtime._installed.is_settled and all(leaf.is_ready() for leaf in jax.tree.leaves(runtime.state))
    version = runtime.version
    start = time.perf_counter()
    runtime.settle()
    assert time.perf_counter() - start < 0.05 and runtime.version == version


def test_the_seal_spares_the_full_check(monkeypatch):
    """An exchange of a slot that fitted once validates no plane anew."""
    runtime = make()
    held = runtime.exchange(runtime.capture())
    monkeypatch.setattr(_fit, "_matching_leaves", lambda *args: pytest.fail("a sealed slot was validated in full"))
    for _ in range(4):
        held = runtime.exchange(held)


@pytest.mark.parametrize(
    ("lengths", "error"),
    [([CAPACITY + 1, 3], sc.CapacityError), ([~3, 3], sc.RefusedError), ([100, 100], sc.CapacityError)],
)
def test_lengths_that_no_state_can_hold_are_not_installed(lengths, error):
    """NA29: beyond the rows, or the mark of a refused transition: neither as a state nor in a slot."""
    runtime = make()
    before, version = host(runtime.state), runtime.version
    wrong = sc.capture(runtime.state) | {"pos": jnp.array(lengths, jnp.int32)}
    slot = dataclasses.replace(runtime.capture(), state=wrong, lengths=np.array(lengths))
    for call in (lambda: runtime.replace_state(wrong, lengths=lengths), lambda: runtime.exchange(slot)):
        with pytest.raises(error):
            call()
    assert_bits(before, runtime.state)
    assert runtime.version == version and not slot.is_consumed


def test_a_patched_runtime_marks_its_arrays_so_that_no_cache_takes_them():
    """Whatever the runtime makes of a patched state refuses a prefix cache; the marks of an argument are kept."""
    runtime, case = make(), cases()["digit"]
    assert not is_marked(runtime.state)
    runtime.replace_state(runtime.state | {"h": runtime.state["h"] + 5})
    slots = [runtime.capture(mode=mode) for mode in MODES]
    slots += [runtime.copy(slots[0]), runtime.copy(slots[2])]
    assert all(is_marked(slot.state) for slot in slots) and is_marked(runtime.state)
    runtime.step([1, 2])
    runtime.verify(WINDOW)
    runtime.commit(1)
    assert is_marked(runtime.state)
    runtime.exchange(slots[2])
    assert is_marked(runtime.state) and ssm.begin(case.backend, runtime.state, tokens=[[1, 2, 3], [3, 2, 1]]).is_patched
    cache = sc.PrefixCache(case.backend, case.params, capacity=CAPACITY, block_size=1, interval=1)
    with pytest.raises(sc.IdentityError, match="h"):
        cache.insert(runtime.state, [1, 2, 3], 0)
    other = make()
    other.replace_state(states.patch(other.state, "h", jnp.copy, planes=case.backend), is_patched=False)
    assert other.is_patched and is_marked(other.state)


def test_na13_a_capture_is_complete_when_it_returns(monkeypatch):
    """NA13: each copy is waited for before the slot is made, whatever its mode."""
    waited = []
    wait = jax.block_until_ready
    monkeypatch.setattr(
        jax, "block_until_ready", lambda tree: waited.extend(map(id, jax.tree.leaves(tree))) or wait(tree)
    )
    runtime = make()
    slot = runtime.capture()
    compact = runtime.capture(mode="compact")
    made = [slot, compact, runtime.copy(slot), runtime.copy(compact), runtime.capture(into=runtime.capture())]
    for each in made:
        assert all(id(leaf) in waited for leaf in jax.tree.leaves(each.state))
    runtime.exchange(compact)
    assert all(id(leaf) in waited for leaf in jax.tree.leaves(runtime.state))


FAULTS = {
    "capture under a budget": (lambda runtime, slot, budget: runtime.capture(budget=budget), ["reserve", "copy"]),
    "copy into": (lambda runtime, slot, budget: runtime.copy(slot, into=runtime.capture()), ["estimate", "reserve"]),
    "exchange of a compact slot": (lambda runtime, slot, budget: runtime.exchange(slot), ["copy", "exchange"]),
    "commit": (lambda runtime, slot, budget: runtime.commit(1), ["dispatch"]),
}


@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name, (_, stages) in FAULTS.items() for stage in stages])
def test_na14_na22_faults_with_budgets_compact_slots_and_windows_change_nothing(name, stage):
    """NA14, NA22: state, slot, window and retained bytes are what they were, and the same call then succeeds."""
    runtime, budget = make(), native.SnapshotBudget(sc.SnapshotLimits())
    slot = runtime.capture(mode="compact", budget=budget)
    if name == "commit":
        runtime.verify(WINDOW)
    before, saved, retained = host(runtime.state), host(slot.state), budget.usage.retained_bytes
    run = FAULTS[name][0]
    with pytest.raises(MemoryError), faults.inject(stage, MemoryError):
        run(runtime, slot, budget)
    gc.collect()
    assert_bits(before, runtime.state)
    assert_bits(saved, slot.state)
    assert budget.usage.retained_bytes == retained and not slot.is_consumed and runtime.support().is_supported
    run(runtime, slot, budget)

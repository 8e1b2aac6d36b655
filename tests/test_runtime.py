"""The runtime: identity, exchange, fence, mirror, open windows."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import CAPACITY, assert_bits, cases, host

import statecore as sc

WINDOW = [[4, 5, 6, 7], [1, 2, 3, 4]]


def make(name: str = "digit", model: sc.Model | None = None) -> sc.Runtime:
    case = cases()[name]
    runtime = sc.Runtime(model or sc.load((case.backend, case.params)), batch=2, capacity=CAPACITY)
    runtime.extend([[1, 2, 3], [3, 2, 1]])
    return runtime


def test_the_mirror_is_the_position():
    runtime = make()
    assert runtime.lengths.tolist() == [3, 3]
    runtime.extend(WINDOW, num_valid=[4, 1])
    runtime.step([1, 2])
    runtime.verify(WINDOW, num_valid=[3, 4])
    runtime.commit([2, 0])
    assert runtime.lengths.tolist() == np.array(runtime.state["pos"]).tolist() == [10, 5]


def test_transitions_agree_with_the_values():
    case, runtime = cases()["decay"], make("decay")
    state, _ = sc.extend(case.backend, case.params, case.state(), [[1, 2, 3], [3, 2, 1]])
    logits = runtime.verify(WINDOW)
    window = sc.verify(case.backend, case.params, state, WINDOW)
    np.testing.assert_array_equal(np.array(logits), np.array(window.logits))
    runtime.commit([3, 1])
    assert sc.equal(case.backend, runtime.state, sc.commit(case.backend, window, [3, 1]))


def test_capture_exchange_and_back():
    runtime = make()
    slot = runtime.capture()
    captured = host(slot.state)
    runtime.step([9, 9])
    later = host(runtime.state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(slot.state)]
    held = runtime.exchange(slot)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runtime.state)] == pointers
    assert_bits(captured, runtime.state)
    assert_bits(later, held.state)
    assert (runtime.lengths.tolist(), held.lengths.tolist()) == ([3, 3], [4, 4])
    with pytest.raises(sc.StateConsumedError, match="exchanged"):
        runtime.exchange(slot)
    runtime.exchange(held)
    assert_bits(later, runtime.state)


def test_a_slot_outlives_what_happens_to_the_runtime():
    runtime = make()
    slot = runtime.capture()
    before = host(slot.state)
    again = runtime.copy(slot)
    runtime.exchange(again)
    runtime.extend(WINDOW)
    runtime.reset()
    assert runtime.lengths.tolist() == [0, 0]
    assert_bits(before, slot.state)


def test_capture_into_a_slot_consumes_it():
    runtime = make()
    pooled = runtime.capture()
    runtime.step([5, 6])
    saved = runtime.capture(into=pooled)
    assert_bits(host(runtime.state), saved.state)
    with pytest.raises(sc.StateConsumedError):
        runtime.copy(pooled)
    with pytest.raises(sc.AliasError):
        runtime.copy(saved, into=saved)
    runtime.validate(saved)


def test_slots_of_another_load_batch_or_capacity_are_refused():
    runtime = make()
    case = cases()["digit"]
    model = runtime.model
    wrong = [
        (sc.IdentityError, make().capture()),
        (sc.IdentityError, make("decay").capture()),
        (sc.GeometryError, sc.Runtime(model, batch=1, capacity=CAPACITY).capture()),
        (sc.GeometryError, sc.Runtime(model, batch=2, capacity=16).capture()),
    ]
    slot = runtime.capture()
    half = dataclasses.replace(slot, state=slot.state | {"h": slot.state["h"].astype(np.int16)})
    wrong.append((sc.GeometryError, half))
    newer = dataclasses.replace(slot, identity=dataclasses.replace(slot.identity, weights_epoch=1))
    wrong.append((sc.IdentityError, newer))
    before = host(runtime.state)
    for error, slot in wrong:
        for use in (runtime.validate, runtime.exchange, runtime.copy, runtime.estimate):
            with pytest.raises(error):
                use(slot)
        assert not slot.is_consumed
    assert_bits(before, runtime.state)
    sibling = sc.Runtime(model, batch=2, capacity=CAPACITY)
    sibling.exchange(runtime.capture())
    assert sc.equal(case.backend, sibling.state, runtime.state)


def test_a_slot_with_a_deleted_buffer_is_refused():
    runtime = make()
    slot = runtime.capture()
    slot.state["h"].delete()
    with pytest.raises(sc.StateConsumedError, match="`h`"):
        runtime.exchange(slot)


def test_an_open_window_refuses_everything_else():
    runtime = make()
    slot = runtime.capture()
    with pytest.raises(sc.LifecycleError, match="No window"):
        runtime.commit(1)
    runtime.verify(WINDOW)
    for call in (
        lambda: runtime.step([1, 2]),
        lambda: runtime.extend(WINDOW),
        lambda: runtime.verify(WINDOW),
        runtime.capture,
        runtime.reset,
        lambda: runtime.exchange(slot),
        runtime.estimate,
    ):
        with pytest.raises(sc.LifecycleError, match="window is open"):
            call()
    with pytest.raises(sc.RollbackError):
        runtime.commit([1, 5])
    runtime.commit([0, 4])
    with pytest.raises(sc.LifecycleError):
        runtime.commit(0)


def test_bad_input_changes_nothing():
    runtime = make()
    before, version = host(runtime.state), runtime.version
    for error, call in (
        (sc.GeometryError, lambda: runtime.step([1, 10])),
        (sc.GeometryError, lambda: runtime.step([1])),
        (sc.CapacityError, lambda: runtime.extend(np.ones((2, 38), int))),
        (sc.RollbackError, lambda: runtime.verify(np.ones((2, 10), int))),
        (sc.GeometryError, lambda: runtime.verify(np.ones((2, 0), int))),
        (sc.UnsupportedError, lambda: runtime.verify(WINDOW, mode="fast")),
    ):
        with pytest.raises(error):
            call()
    assert_bits(before, runtime.state)
    assert (runtime.version, runtime.lengths.tolist()) == (version, [3, 3])


def test_estimates():
    runtime = make()
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(runtime.state))
    assert (
        runtime.estimate() == runtime.estimate(runtime.capture()) == sc.Estimate(retained_bytes=total, copy_bytes=total)
    )
    assert runtime.estimate_growth(None, 5) == 2 * 5 * 4
    assert runtime.estimate_growth(runtime.capture(), 38) is None
    assert runtime.support().is_supported


class Failure(Exception):
    pass


@pytest.mark.parametrize("stage", ["before", "after"])
def test_a_failed_transition_fences_only_if_the_state_is_lost(monkeypatch, stage):
    """A failure before the state was taken leaves the runtime healthy; one after it fences it."""
    from statecore.backend import launch

    runtime = make()
    slot = runtime.capture()
    before = host(runtime.state)

    def fail(backend, params, state, tokens, *, donate):
        if stage == "after":
            jax.tree.map(lambda leaf: leaf.delete(), state)
        raise Failure("the device gave up")

    with monkeypatch.context() as patched:
        patched.setattr(launch, "step", fail)
        with pytest.raises(Failure):
            runtime.step([1, 2])
    if stage == "before":
        assert runtime.support().is_supported
        assert_bits(before, runtime.state)
        runtime.step([1, 2])
        return
    assert not runtime.support().is_supported
    for call in (lambda: runtime.step([1, 2]), runtime.capture, lambda: runtime.exchange(slot), runtime.reset):
        with pytest.raises(sc.FencedError, match="the device gave up"):
            call()
    assert not slot.is_consumed
    healthy = sc.Runtime(runtime.model, batch=2, capacity=CAPACITY)
    healthy.exchange(slot)
    assert_bits(before, healthy.state)


@pytest.mark.parametrize("operation", ["step", "extend", "verify", "commit", "exchange"])
def test_an_interrupt_leaves_the_old_or_the_new_or_a_fence(monkeypatch, operation):
    """Between the state's replacement and the bookkeeping's: never a mirror that lies."""
    runtime = make()
    slot = runtime.capture()
    if operation == "commit":
        runtime.verify(WINDOW)
    install = type(runtime)._install

    def interrupted(self, *args, **options):
        if interrupted.late:
            install(self, *args, **options)
        raise KeyboardInterrupt

    calls = {
        "step": lambda: runtime.step([1, 2]),
        "extend": lambda: runtime.extend(WINDOW),
        "verify": lambda: runtime.verify(WINDOW),
        "commit": lambda: runtime.commit(2),
        "exchange": lambda: runtime.exchange(slot),
    }
    with monkeypatch.context() as patched:
        patched.setattr(type(runtime), "_install", interrupted)
        for interrupted.late in (True, False):
            with pytest.raises((KeyboardInterrupt, sc.FencedError, sc.LifecycleError, sc.StateConsumedError)):
                calls[operation]()
    if runtime.support().is_supported:
        assert np.array(runtime.state["pos"]).tolist() == runtime.lengths.tolist()
    else:
        with pytest.raises(sc.FencedError):
            runtime.step([1, 2])


def test_a_backend_whose_position_miscounts_is_fenced():
    import jax.numpy as jnp

    from statecore import planes as pl

    backend = sc.Backend(
        name="miscounts",
        init=lambda params, batch, capacity: {"pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: ({"pos": state["pos"] + 2}, jnp.zeros((tokens.shape[0], 4))),
        planes={"pos": pl.position()},
    )
    runtime = sc.Runtime(sc.load((backend, None)), capacity=8)
    with pytest.raises(sc.FencedError, match=r"\[2\].*\[1\]"):
        runtime.step([1])


def test_what_is_no_model_and_no_slot_is_refused():
    with pytest.raises(sc.LoadError, match="Backend"):
        sc.Runtime(cases()["digit"].backend, capacity=8)
    runtime = make()
    with pytest.raises(sc.GeometryError, match="str"):
        runtime.exchange("slot")
    with pytest.raises(sc.UnsupportedError, match="bogus"):
        runtime.extend(WINDOW, logits="bogus")


def test_copies_of_marks_are_the_same_marks():
    import copy

    runtime = make()
    runtime.exchange(copy.deepcopy(runtime.capture()))
    window = sc.verify(runtime.model.backend, None, runtime.state, WINDOW)
    sc.commit(runtime.model.backend, copy.deepcopy(window), 2)

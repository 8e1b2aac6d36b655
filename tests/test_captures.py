"""Captures of each mode, into kept slots and grown: what is shared, cut, charged and given back whole."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, CASE_NAMES, assert_bits, cases, host
from runtimes import flat_runtime, make, pointers

import statecore as sc
from statecore import native
from statecore import planes as pl


def test_lazy_slots_of_one_state_in_two_runtimes():
    """Law 4: whoever still shares is never donated to another, whichever runtime moves first."""
    runtime = make()
    sibling = sc.Runtime(runtime.model, batch=2, capacity=CAPACITY)
    first, second = runtime.capture(mode="lazy"), runtime.capture(mode="lazy")
    before = host(runtime.state)
    with pytest.raises(sc.AliasError, match="lazily"):
        sibling.capture(into=first)  # it would write into `second` and the installed state
    sibling.exchange(first)
    sibling.step([1, 1])
    assert_bits(before, second.state)
    assert_bits(before, runtime.state)
    held = runtime.exchange(second)  # the same buffers on both sides
    runtime.step([1, 1])
    assert_bits(before, held.state)
    assert sc.equal(runtime.model.backend, runtime.state, sibling.state)
    third = runtime.capture(mode="lazy")
    assert not third.is_settled
    del third
    gc.collect()
    leaves = jax.tree.leaves(runtime.state)
    runtime.step([2, 2])
    assert all(leaf.is_deleted() for leaf in leaves)  # nobody shares, so that it is donated again


def test_a_lazy_capture_unshares_planes_that_nothing_writes():
    """Law 4: a constant plane, and one that a step hands through, end in one place each."""
    backend = sc.Backend(
        name="still",
        init=lambda params, batch, capacity: {
            "table": jnp.arange(4.0),
            "same": jnp.ones((batch, 2)),
            "pos": jnp.zeros(batch, jnp.int32),
        },
        step=lambda params, state, tokens: (state | {"pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 4))),
        planes={"table": pl.constant(batch_axis=None), "same": pl.recurrent(), "pos": pl.position()},
    )
    runtime = sc.Runtime(sc.load((backend, None)), capacity=8)
    slot = runtime.capture(mode="lazy")
    before = host(slot.state)
    runtime.step([1])
    assert slot.is_settled and set(pointers(slot.state)).isdisjoint(pointers(runtime.state))
    runtime.step([1])
    assert_bits(before, slot.state)
    runtime.capture(into=slot)
    assert np.array(runtime.state["table"]).tolist() == [0, 1, 2, 3]


def test_compact_captures_follow_the_length():
    """Buckets of powers of two from 16: the bytes are the estimate's, and `into` needs the same bucket."""
    runtime = make(capacity=200)
    rows, wanted = [], {3: 16, 16: 16, 17: 32, 40: 64, 150: 200}
    for length in wanted:
        runtime.extend(np.ones((2, length - runtime.lengths[0]), int)) if length > 3 else None
        slot = runtime.capture(mode="compact")
        cost = runtime.estimate(mode="compact")
        assert cost.retained_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(slot.state))
        assert runtime.estimate(slot).copy_bytes == runtime.estimate().copy_bytes  # it comes back whole
        rows.append(slot.state["kv"].shape[1])
        again = runtime.capture(mode="compact", into=slot)
        assert slot.is_consumed and sc.equal(runtime.model.backend, again.state, runtime.state)
        whole = runtime.copy(again)
        assert whole.num_rows is None and whole.state["kv"].shape == (2, 200)
    assert rows == list(wanted.values())
    short = make(capacity=200).model
    runtime = sc.Runtime(short, batch=2, capacity=200)
    small = runtime.capture(mode="compact")
    for options in ({"into": small}, {"into": runtime.capture(), "mode": "compact"}):
        with pytest.raises(sc.GeometryError, match="`kv`"):
            runtime.capture(**options)
    with pytest.raises(sc.UnsupportedError, match="lazy"):
        runtime.capture(mode="lazy", into=small)
    with pytest.raises(sc.UnsupportedError, match="lazy"):
        runtime.copy(small, mode="lazy")
    with pytest.raises(sc.UnsupportedError, match="bogus"):
        runtime.capture(mode="bogus")


@pytest.mark.parametrize("mode", ["fresh", "compact"])
def test_a_pooled_capture_takes_the_buffers_it_was_given(mode):
    """`into=` allocates nothing: the copy lies where the slot that was given lay."""
    runtime = make()
    pooled = runtime.capture(mode=mode)
    given = pointers(pooled.state)
    runtime.step([1, 2])
    saved = runtime.capture(mode=mode, into=pooled)
    assert sorted(pointers(saved.state)) == sorted(given)
    assert sc.equal(runtime.model.backend, saved.state, runtime.state)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_grow_keeps_the_sequences(name):
    """Append planes only; equal, also after going on; no row is lost without a word."""
    case = cases()[name]
    state = case.state(length=9)
    before = host(state)
    grown = native.grow(case.backend, state, 60, params=case.params)
    assert sc.equal(case.backend, grown, state)
    assert jax.tree.structure(grown) == jax.tree.structure(state)
    made = case.backend.geometry(case.params, batch=2, capacity=60)
    sc.validate(made, grown)
    assert set(pointers(grown)).isdisjoint(pointers(state))
    rest = [[1, 2, 3], [4, 5, 6]]
    after = [sc.extend(case.backend, case.params, each, rest)[0] for each in (grown, state)]
    assert sc.equal(case.backend, *after)
    back = native.grow(case.backend, grown, 9)
    assert sc.equal(case.backend, back, state)
    compact = sc.capture(state, mode="compact", backend=case.backend)
    assert sc.equal(case.backend, native.grow(case.backend, compact, CAPACITY), state)
    for bad in (8, 0, -1, 2.5, True):
        with pytest.raises(sc.CapacityError):
            native.grow(case.backend, state, bad)
    assert_bits(before, state)
    traced = jax.jit(lambda leaf: native.grow(case.backend, leaf, 60))(state)
    assert_bits(host(grown), traced)
    with pytest.raises(sc.UnsupportedError, match="trace"):
        jax.jit(lambda leaf: native.grow(case.backend, leaf, 9))(state)


def test_value_captures_say_what_they_cannot():
    case = cases()["digit"]
    state = case.state(length=3)
    for options in ({"mode": "lazy"}, {"mode": "compact"}, {"mode": "bogus"}):
        with pytest.raises(sc.UnsupportedError):
            sc.capture(state, **options)
    with pytest.raises(sc.UnsupportedError, match="trace"):
        jax.jit(lambda leaf: sc.capture(leaf, mode="compact", backend=case.backend))(state)
    into = sc.capture(state, mode="compact", backend=case.backend)
    taken = sc.capture(state, mode="compact", backend=case.backend, into=into)
    assert sc.equal(case.backend, taken, state) and into["kv"].is_deleted()
    with pytest.raises(sc.GeometryError, match="`kv`"):
        sc.capture(state, mode="compact", backend=case.backend, into=sc.capture(state))
    stateless = sc.Backend(
        name="stateless",
        init=lambda params, batch, capacity: {"pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: ({"pos": state["pos"] + 1}, jnp.zeros((1, 2))),
        planes={"pos": pl.position()},
    )
    with pytest.raises(sc.UnsupportedError, match="no append plane"):
        native.grow(stateless, stateless.init(None, capacity=4), 8)


def test_compact_captures_without_append_planes_are_whole():
    """There is nothing to cut, so that a slot of any length takes a copy of any other."""
    runtime = flat_runtime()
    slot = runtime.capture(mode="compact")
    for _ in range(20):
        runtime.step([1])
    slot = runtime.capture(mode="compact", into=slot)
    assert slot.num_rows is None and slot.lengths.tolist() == [20]
    runtime.exchange(slot)


def test_a_lazy_capture_is_charged_no_copy():
    """NB8: it retains what it refers to, and copies nothing."""
    runtime, budget = make(), native.SnapshotBudget(sc.SnapshotLimits(cumulative_copy_bytes=0))
    slot = runtime.capture(mode="lazy", budget=budget)
    assert runtime.estimate(mode="lazy").copy_bytes == 0
    assert budget.usage.retained_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(slot.state))


def test_grow_asks_init_where_append_planes_differ():
    """Rows of S and of 2S: the capacity alone does not say how many each shall have."""

    def init(params, batch, capacity):
        kv, pairs = jnp.ones((batch, capacity)), jnp.ones((batch, 2 * capacity))
        return {"kv": kv, "pairs": pairs, "pos": jnp.zeros(batch, jnp.int32)}

    def step(params, state, tokens):
        return state | {"pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 10))

    planes = {"kv": pl.append(axis=1), "pairs": pl.append(axis=1), "pos": pl.position()}
    backend = sc.Backend(name="pairs", init=init, step=step, planes=planes)
    state = backend.init((), batch=1, capacity=4)
    with pytest.raises(sc.UnsupportedError, match="`pairs` 8"):
        native.grow(backend, state, 8)
    grown = native.grow(backend, state, 8, params=())
    assert grown["kv"].shape == (1, 8) and grown["pairs"].shape == (1, 16)

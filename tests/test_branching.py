"""Snapshots, forks, exchanges: what they hold, cost and leave alone; that nothing runs; faults at every stage."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generations import PROMPTS, WARM, alone, model, start
from helpers import assert_bits, host

import statecore as sc
from statecore import planes as pl
from statecore.generation import OneOf, Status
from statecore.runtime import faults

SAMPLERS = {
    "greedy": sc.Sampler(),
    "sampled": WARM,
    "penalties": sc.Sampler(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "mirostat": sc.Sampler(temperature=1.0, mirostat=sc.Mirostat(tau=2.0, eta=0.3)),
}
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def record(gen):
    """Returns everything that a refused operation must leave as it was."""
    run = gen._run
    return {
        "state": host(gen.runtime.state),
        "tokens": gen.tokens,
        "sampling": host({"counts": run.sampling.counts, "mu": run.sampling.mu}),
        "key": None if run.sampling.key is None else np.array(jax.random.key_data(run.sampling.key)),
        "life": run.lifecycle,
        "forced": run.forced,
        "masks": [None if row.constraint is None else row.constraint.mask().tolist() for row in run.rows],
    }


def assert_record(gen, before):
    now = record(gen)
    assert_bits({k: before[k] for k in ("state", "sampling")}, {k: now[k] for k in ("state", "sampling")})
    np.testing.assert_equal(now["key"], before["key"])
    for name in ("tokens", "life", "forced", "masks"):
        assert now[name] == before[name], name


@by_sampler
def test_nc5_a_restored_run_repeats_itself(sampler):
    """NC1, NC5: with all that the sampler carries, sampled or not, as often as wanted."""
    gen = start(sampler=sampler, max_tokens=40, stop_strings=["...."])
    gen.run(5)
    snap = gen.snapshot()
    wanted = gen.run(12)
    for _ in range(2):
        gen.restore(snap)
        assert gen.run(12) == wanted
        gen.restore(snap)
        assert gen.run(12, speculate=sc.NGramDraft(num_draft=4)) == wanted


@by_sampler
def test_f66_cut_anywhere_the_run_is_the_same(sampler):
    """F66: interrupted and restored at every token equals uninterrupted."""
    whole = start(sampler=sampler, max_tokens=10).run(10)
    gen = start(sampler=sampler, max_tokens=10)
    for _ in range(10):
        snap = gen.snapshot()
        gen.step()
        gen.restore(snap)
        gen.step()
    assert gen.tokens == whole


@by_sampler
def test_f78_two_runs_exchanged_at_each_step(sampler):
    """F78, NC10: exchanging after every token gives the outputs of two separate runs."""
    alone_a = start(sampler=sampler, seed=1, max_tokens=12)
    alone_a.run(12)
    gen = start(sampler=sampler, seed=1, max_tokens=12)
    (branch,) = gen.fork(gen.snapshot(), n=1, seed=8)
    other = start(sampler=sampler, seed=1, max_tokens=12)
    (single,) = other.fork(other.snapshot(), n=1, seed=8)
    other.exchange(single)
    other.run(12)
    for _ in range(12):
        gen.step()
        gen.exchange(branch)
        gen.step()
        gen.exchange(branch)
    assert gen.tokens == alone_a.tokens and branch.tokens == other.tokens


def test_f77_a_slot_used_again_carries_nothing_over():
    """F77: forced tokens, stop look-behind and counts of what was exchanged out stay with it."""
    gen = start(sampler=SAMPLERS["penalties"], max_tokens=30)
    branch = gen.fork(gen.snapshot())
    gen.run(6)
    gen.force(3)
    gen.exchange(branch)
    fresh = start(sampler=SAMPLERS["penalties"], max_tokens=30)
    assert gen.run(10) == fresh.run(10)
    gen.exchange(branch)
    assert gen.step()[0] == 3


def test_f72_documents_fed_one_after_the_other_do_not_leak():
    """F72: a generation begins from an empty state, whatever its runtime held."""
    runtime = sc.Runtime(model(), batch=1, capacity=96)
    wanted = [alone(0, max_tokens=6).run(6), alone(1, max_tokens=6).run(6)]
    found = [sc.Generation(runtime, prompt, max_tokens=6).run(6) for prompt in PROMPTS]
    assert found == wanted


# What it costs.


def probed(backend, calls):
    """Returns the backend with functions that note each call that really runs."""

    def counted(name, function):
        if function is None:
            return None

        def run(*args):
            jax.debug.callback(lambda: calls.append(name))
            return function(*args)

        return run

    functions = backend.functions
    made = {name: counted(name, getattr(functions, name)) for name in ("step", "extend", "verify", "replay")}
    return sc.Backend(name="probe", init=functions.init, planes=backend.planes, **made)


@pytest.mark.parametrize("name", ["digit", "decay", "decay-own", "tiny-hybrid"])
def test_nc9_nothing_runs_or_is_drawn(name):
    """NC9, NC13, NE3: copies, forks, exchanges and overrides run no function and draw nothing."""
    calls = []
    given = sc.load("tiny-hybrid") if name == "tiny-hybrid" else model(name)
    loaded = sc.load((probed(given.backend, calls), given.params))
    gen = sc.Generation(sc.Runtime(loaded, capacity=64), [1, 2, 3], sampler=WARM, max_tokens=20)
    gen.run(4)
    jax.effects_barrier()
    ran, key = len(calls), np.array(jax.random.key_data(gen._run.sampling.key))
    assert ran >= 4
    snap = gen.snapshot()
    branches = [gen.fork(snap), *gen.fork(snap, n=2)]
    for branch in branches:
        gen.exchange(branch)
        gen.exchange(branch)
    gen.restore(snap)
    gen.override(temperature=0.5)
    gen.tree(), gen.estimate(), gen.support()
    gen.runtime.copy(snap.slot)
    jax.effects_barrier()
    assert len(calls) == ran
    np.testing.assert_array_equal(np.array(jax.random.key_data(gen._run.sampling.key)), key)
    gen.step()
    jax.effects_barrier()
    assert len(calls) == ran + 1


def test_f79_what_a_restore_costs_is_known_before_and_an_exchange_costs_nothing():
    """F79: the estimate is the bytes that living arrays grow by; an exchange makes none."""
    gen = start(max_tokens=20)
    gen.run(2)
    before, estimate = living_bytes(), gen.estimate()
    snap = gen.snapshot()
    assert living_bytes() - before == estimate.copy_bytes
    branch = gen.fork(snap)
    held = living_bytes()
    assert held - before == 2 * estimate.copy_bytes
    gen.exchange(branch)
    assert living_bytes() == held
    gen.restore(gen.snapshot())
    assert living_bytes() == held


def living_bytes():
    gc.collect()
    return sum(
        array.nbytes for array in jax.live_arrays() if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    )


def test_f81_a_plane_that_cannot_be_saved_is_named():
    """F81: one plane of unknown size stops every save, says which it is, and stops no step."""
    backend = sc.Backend(
        name="small",
        init=lambda params, batch, capacity: {
            "pos": jnp.zeros(batch, jnp.int32),
            "odd": jnp.zeros((batch, 4), jnp.int4),
        },
        step=lambda params, state, tokens: (state | {"pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 4))),
        planes={"pos": pl.position(), "odd": pl.constant()},
    )
    gen = sc.Generation(sc.Runtime(sc.load((backend, None)), capacity=16), [1, 2], max_tokens=6)
    usage, support = gen.usage, gen.support()
    assert not support.is_supported and "odd" in support.reason
    with pytest.raises(sc.BudgetError, match="odd"):
        gen.snapshot()
    assert gen.usage == usage and len(gen.run(2)) == 2 and gen.status is Status.PAUSED
    assert len(gen.run(4)) == 4 and gen.status is Status.COMPLETED


def test_exchange_moves_no_buffer_and_leases_follow_the_child():
    """NA21, NB7: the same buffers, and the branch's charge goes where it goes."""
    gen = start(max_tokens=20)
    gen.enable_snapshots(sc.SnapshotLimits())
    branch = gen.fork(gen.snapshot())
    held = gen.usage.retained_bytes
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((gen.runtime.state, branch.slot.state))]
    gen.exchange(branch)
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((branch.slot.state, gen.runtime.state))]
    assert after == pointers
    del branch
    gc.collect()
    assert (gen.usage.retained_bytes, gen.usage.branches) == (held, 1)


def test_nb9_unknown_growth_stops_forks_not_snapshots():
    """NB9, NB1: a state without a known capacity is saved, and not forked."""
    gen = start(max_tokens=20)
    snap = gen.snapshot()
    usage = gen.usage
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(gen.runtime), "estimate_growth", lambda *args: None)
        with pytest.raises(sc.BudgetError, match="unknown"):
            gen.fork(snap)
    assert gen.usage == usage and gen.snapshot()


def test_n_forks_are_all_or_none():
    gen = start(max_tokens=20)
    gen.enable_snapshots(sc.SnapshotLimits(max_branches=2))
    snap = gen.snapshot()
    with pytest.raises(sc.BudgetError, match="branch count"):
        gen.fork(snap, n=3)
    gc.collect()
    assert gen.usage.branches == 0
    assert len(gen.fork(snap, n=2)) == 2
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(sc.StateError):
            gen.fork(snap, n=wrong)


def test_nc8_the_limit_of_a_fork():
    """NC8, NC11: not below what was emitted, not above what fits; a child may end earlier or go on longer."""
    gen = start(max_tokens=8)
    text = start(max_tokens=16).run(16)
    gen.run(8)
    snap = gen.snapshot()
    for wrong, word in ((7, "emitted"), (0, "at least 1"), (1000, "capacity")):
        with pytest.raises(sc.CapacityError, match=word):
            gen.fork(snap, max_tokens=wrong)
    same, longer = gen.fork(snap), gen.fork(snap, max_tokens=16)
    gen.exchange(same)
    assert gen.status is Status.COMPLETED
    gen.exchange(longer)
    gen.run(8)
    assert gen.tokens == text


# The tree.


def test_the_tree_of_runs():
    gen = start(max_tokens=30)
    gen.run(2)
    snap = gen.snapshot()
    left, right = gen.fork(snap), gen.fork(snap)
    gen.exchange(left)
    gen.run(3)
    deep = gen.fork(gen.snapshot())
    tree = gen.tree()
    assert (tree.num_runs, tree.num_forks, tree.num_exchanges) == (4, 3, 1)
    assert tree.root.name == "0" and tree.root.num_tokens == 2 and tree.root.snapshots == (2,)
    first, second = tree.root.children
    assert first.is_running and first.num_tokens == 5 and second.num_tokens == 2
    assert [child.name for child in first.children] == ["0.0.0"] and "0.0.0: 5 tokens" in str(tree)
    assert tree.usage == gen.usage
    del deep, right
    gc.collect()
    assert gen.tree().num_runs == 2


def test_best_of_n():
    """The best by the model's own mean, the others given back; the budget holds one."""
    gen = alone(0, sampler=WARM, num_logprobs=0, max_tokens=40)
    gen.run(3)
    snap = gen.snapshot()
    futures = sc.best_of_n(gen, 4, 8, seed=5)
    gc.collect()
    assert [future.score for future in futures] == sorted((future.score for future in futures), reverse=True)
    assert gen.tokens[3:] == list(futures[0].tokens) and len({future.tokens for future in futures}) > 1
    assert futures[0].score == pytest.approx(sum(gen.logprobs[3:]) / 8)
    assert gen.usage.branches == 1
    for number, branch in enumerate(gen.fork(snap, n=4, seed=5)):
        gen.exchange(branch)
        assert tuple(gen.run(8)) in {future.tokens for future in futures}, number
    with pytest.raises(sc.UnsupportedError, match="num_logprobs"):
        sc.best_of_n(alone(0, sampler=WARM), 2, 4)


# Faults.

STAGES = {
    "snapshot": ["estimate", "reserve", "pending", "copy", "copied"],
    "restore": ["estimate", "reserve", "pending", "copy", "copied", "exchange"],
    "fork": ["estimate", "growth", "reserve", "pending", "copy", "copied"],
    "exchange": ["exchange"],
}


@by_sampler
@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name, stages in STAGES.items() for stage in stages])
def test_nc12_a_fault_at_each_stage(sampler, name, stage):
    """NC4, NC12, NA14, NA22, NB5, NF7, F23: as it was, no lease left, copies stay counted, the next try is exact."""
    grammar = OneOf([[1, 2] * 10, [2, 1] * 10], vocab_size=16)
    gen = start(sampler=sampler, max_tokens=30, constraint=[grammar, None])
    gen.run(4)
    snap = gen.snapshot()
    wanted = gen.run(6)
    branch = gen.fork(snap)
    calls = {
        "snapshot": gen.snapshot,
        "restore": lambda: gen.restore(snap),
        "fork": lambda: gen.fork(snap),
        "exchange": lambda: gen.exchange(branch),
    }
    before, usage, saved = record(gen), gen.usage, host(snap.slot.state)
    with faults.inject(stage, RuntimeError("on purpose")), pytest.raises(RuntimeError, match="on purpose"):
        calls[name]()
    gc.collect()
    assert_record(gen, before)
    assert_bits(saved, snap.slot.state)
    now = gen.usage
    assert (now.snapshots, now.branches, now.retained_bytes) == (usage.snapshots, usage.branches, usage.retained_bytes)
    assert now.cumulative_copy_bytes >= usage.cumulative_copy_bytes
    if stage in ("estimate", "growth", "reserve"):
        assert now == usage
    calls[name]()
    gen.restore(snap) if name != "exchange" else None
    assert gen.run(6) == wanted


def test_nc6_nc7_snapshots_stay_with_their_run_and_driver():
    """NC6, NC7: another run of the tree cannot restore it; another generation cannot fork it."""
    gen = start(max_tokens=20)
    snap = gen.snapshot()
    branch = gen.fork(snap)
    gen.exchange(branch)
    with pytest.raises(sc.IdentityError, match="another branch"):
        gen.restore(snap)
    later = sc.Generation(gen.runtime, PROMPTS, max_tokens=20)
    with pytest.raises(sc.IdentityError):
        later.fork(snap)


# Edits.


def test_a_patched_run_is_marked_and_enters_no_cache():
    """Its snapshots, forks and what comes back of them are marked too; a fresh start is not."""
    loaded = model()
    cache = sc.PrefixCache(loaded.backend, loaded.params, capacity=96)
    gen = sc.Generation(sc.Runtime(loaded, capacity=96), PROMPTS[0], prefix_cache=cache, max_tokens=40)
    clean = gen.snapshot()
    gen.run(4)
    kept = len(cache)
    gen.patch("h", lambda h: h + 1.0)
    marked = gen.snapshot()
    gen.run(6)
    assert gen.runtime.is_patched and "patched" in gen.warm.note and len(cache) == kept
    text = gen.tokens
    gen.exchange(gen.fork(marked))
    gen.run(6)
    assert gen.tokens == text and gen.runtime.is_patched and len(cache) == kept
    (branch,) = gen.fork(clean, n=1)
    gen.exchange(branch)
    assert not gen.runtime.is_patched
    gen.run(4)
    assert sc.differing_planes(loaded.backend, gen.runtime.state, marked.slot.state) == ("h",)
    before = record(gen)
    for path, fn in (("nothing", lambda x: x), ("h", lambda h: h[0]), ("pos", lambda pos: pos + 1)):
        with pytest.raises(sc.StateError):
            gen.patch(path, fn)
        assert_record(gen, before)

"""What an attack on generations found: interrupts between two halves, calls from within, refusals without a name."""

import dataclasses
import gc
import threading

import numpy as np
import pytest
from generations import WARM, alone, model, start
from helpers import assert_bits, host
from runtimes import flat_runtime, interrupted_at, make
from test_branching import assert_record, record

import statecore as sc
from statecore.generation import OneOf, Status
from statecore.runtime import faults
from statecore.ssm import Decline

ALL = np.ones(10, bool)
CHOICES = [[1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8]]


class Once:
    """A constraint that allows everything and fails once when it is told to."""

    is_complete = False

    def __init__(self):
        self.told = [False]

    def mask(self):
        return ALL

    def advance(self, token):
        if self.told.pop():
            self.told.append(False)
            raise RuntimeError("on purpose")
        self.told.append(False)

    def copy(self):
        other = Once()
        other.told = self.told
        return other

    def nbytes(self):
        return 8


class Acting:
    """A draft that does something at its first guess."""

    def __init__(self, act, guess=(), num_draft=2):
        self.act, self.guess, self.num_draft = act, list(guess), num_draft

    def propose(self, history, limit):
        act, self.act = self.act, None
        if act is not None:
            act()
        return self.guess[:limit]


# Interrupts and failures in the middle.


def test_a_verify_that_fails_later_has_written_rings_too():
    """The rows that it has overwritten are not gone back to."""
    grammar = Once()
    options = {"sampler": sc.Sampler(temperature=3.0), "seed": 5, "boundaries": ALL, "boundary_slots": 12}
    gen = start("digit", batch=1, prompt=[1, 2, 3, 4, 5, 6, 7], constraint=grammar, **options)
    gen.run(10)
    before = gen.tokens
    grammar.told[:] = [True]
    with pytest.raises(RuntimeError, match="on purpose"):
        gen.run(9, speculate=Acting(None, [9] * 8, num_draft=8))
    assert gen.rollback_to_boundary(4).decline is Decline.NOT_REWINDABLE
    assert gen.tokens == before
    alike = start("digit", batch=1, prompt=[1, 2, 3, 4, 5, 6, 7], constraint=Once(), **options)
    alike.run(10)
    assert alike.rollback_to_boundary(4).decline is None


def interrupted_exchanges(gen, branch):
    """Exchanges until it was interrupted before each line that runs."""
    for line in range(1, 1000):
        was = interrupted_at(line, lambda: gen.exchange(branch), "/statecore/")
        yield
        if not was:
            return
    raise AssertionError("never came to an end")


@pytest.mark.slow
def test_an_exchange_is_whole_wherever_it_is_interrupted():
    gen = alone(0, sampler=WARM)
    gen.run(3)
    branch = gen.fork(gen.snapshot(), seed=9)
    gen.run(4)
    sides = {7: (gen.tokens, host(gen.runtime.state)), 3: (branch.tokens[0], host(branch.slot.state))}
    usage, seen = gen.usage, set()
    for _ in interrupted_exchanges(gen, branch):
        gc.collect()
        here, there = sides[len(gen.tokens)], sides[10 - len(gen.tokens)]
        seen.add(len(gen.tokens))
        assert gen.tokens == here[0] and branch.tokens[0] == there[0]
        assert_bits(here[1], gen.runtime.state)
        assert_bits(there[1], branch.slot.state)
        assert (branch.reservation is None) == (len(branch.tokens[0]) == 7)
        assert gen.usage == usage
        gen.clear_forced()  # refused if something had driven the runtime
    assert seen == {3, 7}


def test_a_branch_whose_state_is_not_its_texts_is_refused():
    gen = alone(0, sampler=WARM)
    gen.run(3)
    snap = gen.snapshot()
    branch = gen.fork(snap)
    gen.run(4)
    branch.slot, before = gen.runtime.capture(), record(gen)
    wrong = dataclasses.replace(snap, slot=gen.runtime.capture())
    for call in (lambda: gen.exchange(branch), lambda: gen.restore(wrong), lambda: gen.fork(wrong)):
        with pytest.raises(sc.LifecycleError, match="its text needs"):
            call()
        assert_record(gen, before)


@pytest.mark.parametrize("options", [{"num_logprobs": 0}, {"max_tokens": 4}, {"stop_tokens": [7]}], ids=str)
def test_an_interrupted_take_is_refused_or_whole(options):
    """No token is emitted without its constraint and its end."""
    grammar = OneOf(CHOICES, vocab_size=10) if "num_logprobs" in options else None
    gen = start("digit", batch=1, prompt=[1, 2, 3], constraint=grammar, **options)
    gen.run(2)
    snap = gen.snapshot()
    wanted = gen.run(8)
    gen.restore(snap)
    for line in range(1, 400):
        was = interrupted_at(line, lambda: gen.run(8), "generation/_row.py")
        try:
            if gen.status is not Status.COMPLETED:
                gen.run(8)
            gen.clear_forced()
        except sc.LifecycleError as refusal:
            assert "cut short" in str(refusal)
        else:
            assert gen.tokens[2:] == wanted and gen.status is Status.COMPLETED
        gen.restore(snap)
        if not was:
            break
    assert line > 20


@pytest.mark.parametrize("file", ["_emit", "_saved"])
def test_a_call_interrupted_at_its_end_is_mended(file):
    """The run does not stay running: the next call goes on, or `restore` does."""
    gen = alone(0, sampler=WARM)
    gen.run(3)
    snap = gen.snapshot()
    wanted = gen.run(6)
    gen.restore(snap)
    for line in range(1, 400):
        was = interrupted_at(line, lambda: gen.run(2), f"generation/{file}.py")
        try:
            gen.run(6)
        except sc.LifecycleError as refusal:
            assert "cut short" in str(refusal)
        else:
            assert gen.tokens[3:9] == wanted
        gen.restore(snap)
        assert gen.status is Status.PAUSED
        if not was:
            break
    assert line > 5


def test_a_start_that_fails_leaves_the_run_before_restorable():
    runtime = sc.Runtime(model("digit"), batch=1, capacity=64)
    gen = sc.Generation(runtime, [1, 2, 3])
    gen.run(3)
    snap = gen.snapshot()
    wanted = gen.run(5)
    with faults.inject("dispatch", RuntimeError("boom")), pytest.raises(RuntimeError, match="boom"):
        sc.Generation(runtime, [4, 5, 6])
    with pytest.raises(sc.LifecycleError, match="restore"):
        gen.run(1)
    gen.fork(snap)
    gen.restore(snap)
    assert gen.run(5) == wanted


# Calls from within and in between.


def test_a_stream_goes_on_from_the_call_and_not_from_its_first_piece():
    gen = alone(0, sampler=WARM)
    gen.run(4)
    branch = gen.fork(gen.snapshot(), seed=9)
    for move in (lambda: gen.run(3), lambda: gen.exchange(branch), lambda: gen.restore(gen.snapshot())):
        stream = gen.stream(5)
        move()
        before = record(gen)
        with pytest.raises(sc.LifecycleError, match="Start another stream"):
            next(stream)
        assert_record(gen, before)


@pytest.mark.parametrize("is_thread", [False, True], ids=["draft", "thread"])
@pytest.mark.parametrize("name", ["exchange", "patch", "override", "force", "clear_forced"])
def test_nothing_changes_a_run_that_is_running(name, is_thread):
    wanted = alone(0, sampler=WARM).run(10)
    gen = alone(0, sampler=WARM)
    gen.run(4)
    branch = gen.fork(gen.snapshot(), seed=9)
    calls = {
        "exchange": lambda: gen.exchange(branch),
        "patch": lambda: gen.patch("h", lambda plane: plane + 1),
        "override": lambda: gen.override(seed=3),
        "force": lambda: gen.force(3),
        "clear_forced": gen.clear_forced,
    }
    met = []

    def refused():
        with pytest.raises(sc.LifecycleError, match="is running"):
            calls[name]()
        met.append(name)

    def act():
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()

    gen.run(6, speculate=Acting(act if is_thread else refused))
    assert met == [name] and gen.tokens == wanted and gen.status is Status.PAUSED
    assert branch.tokens[0] == wanted[:4]


# What a branch may come to hold.


def test_a_fork_grows_from_each_sequences_own_length():
    """Rows that speculation has left at different lengths fill the capacity, and no more."""
    prompts = [[1] * 10, [2, 3]]
    text = start("digit", capacity=40, prompt=prompts).run(31)[0]
    gen = start("digit", capacity=40, prompt=prompts)

    class Oracle:
        num_draft = 5

        def propose(self, history, limit):
            if len(history) > 12:
                gen.control.pause()
            return text[len(history) - 10 :][:limit] if history[0] == 1 else []

    gen.run(20, speculate=Oracle())
    gen.resume()
    assert len(gen.tokens[0]) > 6 + len(gen.tokens[1])
    snap = gen.snapshot()
    before = gen.usage.retained_bytes
    branch = gen.fork(snap)
    left = [31 - len(row) for row in gen.tokens]
    each = [gen.runtime.estimate_growth(snap.slot, more) for more in ([left[0], 0], [0, left[1]])]
    assert gen.usage.retained_bytes - before == gen.estimate(snap).retained_bytes + sum(each)
    gen.exchange(branch)
    gen.run(31)
    assert [len(row) for row in gen.tokens] == [31, 31]


def test_a_fork_after_a_draw_that_failed_fits_as_before():
    gen = start("digit", batch=1, capacity=20, prompt=[1, 2, 3], constraint=(grammar := Once()))
    gen.run(2)
    grammar.told[:] = [True]
    with pytest.raises(RuntimeError, match="on purpose"):
        gen.run(1)
    gen.exchange(gen.fork(gen.snapshot()))
    assert len(gen.run(30)) == 16


def test_growth_in_buckets_follows_the_longest_sequence():
    runtime = make()
    assert runtime.estimate_growth(None, [5, 1], bucket=4) == runtime.estimate_growth(None, 5, bucket=4)
    assert runtime.estimate_growth(None, [5, 5]) == runtime.estimate_growth(None, 5)


def test_a_branch_that_cannot_fit_is_not_called_unknown():
    gen = sc.Generation(flat_runtime(), [1, 2], max_tokens=2**40)
    with pytest.raises(sc.BudgetError, match="do not fit"):
        gen.fork(gen.snapshot())
    gen.fork(gen.snapshot(), max_tokens=2**20)


def test_a_refused_fork_of_several_makes_none():
    gen = alone(0)
    gen.enable_snapshots(sc.SnapshotLimits(max_branches=2))
    snap = gen.snapshot()
    with pytest.raises(sc.BudgetError, match="branch count"):
        gen.fork(snap, n=3)
    assert gen.tree().num_forks == 0 and gen.usage.branches == 0
    branch = gen.fork(snap)
    assert [child.name for child in gen.tree().root.children] == ["0.0"] and branch.tokens == [[]]


def test_names_of_dropped_branches_are_forgotten_and_never_given_again():
    gen = alone(0)
    snap = gen.snapshot()
    kept = gen.fork(snap)
    for _ in range(5):
        gen.fork(snap)
    gc.collect()
    last = gen.fork(snap)
    assert [child.name for child in gen.tree().root.children] == ["0.0", "0.6"]
    assert len(gen._family._names) == len(gen._family._lengths) == 3
    gen.exchange(kept)
    below = gen.fork(gen.snapshot())
    gen.exchange(last)
    del kept, last, snap
    gc.collect()
    assert "0.0.0" in str(gen.tree()) and below.tokens == [[]]


# Refusals with a name.


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"temperature": 10**5000},
        {"repetition_penalty": 10**400},
        {"logit_bias": {0: 10**400}},
        {"logit_bias": (([1], 2.0),)},
        {"logit_bias": {1j: 1.0, 2j: 1.0}},
        {"temperature": 1.0, "mirostat": sc.generation.Mirostat(tau=1e39)},
        {"temperature": 1.0, "top_k": -(10**400)},
    ],
    ids=lambda it: [*it][-1],
)
def test_a_setting_without_a_meaning_is_named(settings):
    with pytest.raises(sc.UnsupportedError, match=[*settings][-1]):
        alone(0, sampler=sc.Sampler(**settings))


def test_a_top_k_beyond_the_vocabulary_cuts_nothing():
    texts = [alone(0, sampler=sc.Sampler(temperature=1.0, top_k=top_k)).run(5) for top_k in (None, 10**400)]
    assert texts[0] == texts[1]


class OnlyMask:
    def mask(self):
        return ALL


@pytest.mark.parametrize("num_draft", [1.5, True, "2", 0])
def test_a_draft_of_no_whole_number_is_refused(num_draft):
    gen = alone(0)
    with pytest.raises(sc.UnsupportedError, match="num_draft"):
        gen.run(3, speculate=Acting(None, num_draft=num_draft))
    assert gen.tokens == []


def test_what_is_no_argument_at_all_is_named():
    gen, runtime = alone(0), make()
    with pytest.raises(sc.UnsupportedError, match="`runtime` must be a Runtime"):
        sc.Generation(None, [1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(sc.BudgetError, match="must be a SnapshotLimits"):
        gen.enable_snapshots({"max_snapshots": 1})  # pyright: ignore[reportArgumentType]
    slot = runtime.capture()
    for call in (lambda: runtime.capture(budget=3), lambda: runtime.copy(slot, budget=3)):  # pyright: ignore[reportArgumentType]
        with pytest.raises(sc.BudgetError, match="must be a SnapshotBudget"):
            call()
    with pytest.raises(sc.UnsupportedError, match="lacks `advance`, `copy`, `nbytes`, `is_complete`"):
        start("digit", batch=1, prompt=[1], constraint=OnlyMask())
    for penalty in ("x", None, True, float("nan"), 10**400):
        with pytest.raises(sc.GeometryError, match="length_penalty"):
            sc.beam_search(gen.runtime.model, [1], num_beams=2, num_tokens=2, length_penalty=penalty)  # pyright: ignore[reportArgumentType]


def test_what_is_wrong_with_a_slot_is_said_as_it_is():
    runtime = make()
    slot = runtime.capture()
    with pytest.raises(sc.GeometryError, match=r"are a list, \[3, 3\], but must be an array"):
        runtime.validate(dataclasses.replace(slot, lengths=[3, 3]))
    assert slot._repr_html_() is not None
    slot.state["h"].delete()
    assert slot._repr_html_() is None
    with pytest.raises(sc.StateConsumedError, match="deleted by hand"):
        runtime.validate(slot)

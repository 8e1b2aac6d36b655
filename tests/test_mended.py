"""Requests in the middle, failures in what a user brings, and objects of the wrong kind: nothing is lost or revived."""

import gc
import threading

import jax
import numpy as np
import pytest
from generations import PROMPTS, WARM, Letters, alone, start
from helpers import assert_bits, cases, host
from test_branching import assert_record, record
from test_warm import MASK

import statecore as sc
from statecore.generation import Finish, LoopGuard, OneOf, Status

WORDS = ["abcabcabcabc", "abcabdabcabd"]


class During:
    """A draft that does something in the middle of a run, and guesses nothing."""

    num_draft = 2

    def __init__(self, act, at):
        self.act, self.at = act, at

    def propose(self, history, limit):
        if len(history) == self.at:
            thread = threading.Thread(target=self.act)
            thread.start()
            thread.join()
        return []


@pytest.mark.parametrize("by", ["generation", "control"])
def test_nd6_a_pause_in_the_middle_from_another_thread(by):
    """ND6: taken up between two tokens, whoever is asked; sticky; nothing lost or drawn twice."""
    wanted = alone(0, sampler=WARM, max_tokens=12).run(12)
    gen = alone(0, sampler=WARM, max_tokens=12)
    pause = gen.pause if by == "generation" else gen.control.pause
    assert len(gen.run(12, speculate=During(pause, 4 + 5))) == 6
    assert gen.status is Status.PAUSED
    for _ in range(2):
        with pytest.raises(sc.LifecycleError, match="paused"):
            gen.step()
    gen.resume()
    gen.run(12)
    assert gen.tokens == wanted


@pytest.mark.parametrize("by", ["generation", "control"])
def test_nd1_nd5_a_cancel_in_the_middle_from_another_thread(by):
    """ND1, ND3, ND5: for good, from the next token on."""
    gen = alone(0, sampler=WARM, max_tokens=30, boundaries=MASK, boundary_slots=4)
    snap = gen.snapshot()
    cancel = gen.cancel if by == "generation" else gen.control.cancel
    assert len(gen.run(20, speculate=During(cancel, 4 + 5))) == 6
    assert gen.status is Status.CANCELLED
    before = record(gen)
    for call in (gen.step, gen.snapshot, lambda: gen.restore(snap), lambda: gen.rollback_to_boundary(0), gen.stream):
        with pytest.raises(sc.LifecycleError, match="cancelled"):
            call()
        assert_record(gen, before)


def test_a_cancel_that_comes_too_late_is_dropped():
    """A run that is complete cannot be cancelled; what follows is not refused for it."""
    gen = alone(0, max_tokens=4)
    snap = gen.snapshot()
    text = gen.run(4)
    gen.control.cancel()
    gen.restore(snap)
    assert gen.run(4) == text


# What a user brings may fail.


class Failing(OneOf):
    """A constraint of which one method fails once, at the wanted call."""

    fails: tuple[str, int] = ("", 0)
    calls: dict = {}  # noqa: RUF012

    def _count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1
        if (name, self.calls[name]) == self.fails:
            raise RuntimeError("on purpose")

    def mask(self):
        self._count("mask")
        return super().mask()

    def advance(self, token):
        self._count("advance")
        super().advance(token)

    def copy(self):
        self._count("copy")
        other = object.__new__(Failing)
        other.__dict__.update(self.__dict__)
        return other


def failing(name, at):
    made = Failing([Letters().encode(word) for word in WORDS], vocab_size=16)
    made.fails, made.calls = (name, at), {}
    return made


@pytest.mark.parametrize("name", ["mask", "advance", "copy"])
@pytest.mark.parametrize("speculate", [None, sc.NGramDraft(num_draft=3)], ids=["plain", "ngram"])
def test_nc13_nc14_a_constraint_that_fails_once(name, speculate):
    """NC13, NC14: the call fails, the run is as it was before its last token, and goes on exactly."""
    wanted = alone(0, max_tokens=12, constraint=failing("", 0)).run(12)
    met = 0
    for at in range(1, 16):
        gen = alone(0, max_tokens=12, constraint=(grammar := failing(name, 10**6)))
        grammar.calls.clear()
        gen._run.rows[0].constraint.fails = grammar.fails = (name, at)
        try:
            gen.run(12, speculate=speculate)
        except RuntimeError:
            met += 1
            assert gen.tokens == wanted[: len(gen.tokens)] and gen.status in (Status.PREPARED, Status.PAUSED)
            snap = gen.snapshot()
            gen.run(12, speculate=speculate)
            assert gen.tokens == wanted
            gen.restore(snap)
            gen.run(12)
        assert gen.tokens == wanted
    assert met > 3


def test_nc13_a_tokenizer_that_fails_once(monkeypatch):
    """NC13: where stop strings look at the text, before anything of the token is kept."""
    wanted = alone(0, max_tokens=12, stop_strings=["...."]).run(12)
    gen = alone(0, max_tokens=12, stop_strings=["...."])
    gen.run(3)
    before = record(gen)["tokens"]
    with monkeypatch.context() as patched:
        patched.setattr(Letters, "decode", lambda *args: (_ for _ in ()).throw(RuntimeError("on purpose")))
        with pytest.raises(RuntimeError):
            gen.run(4)
    assert gen.tokens == before
    gen.run(9)
    assert gen.tokens == wanted


def test_logits_without_a_choice_keep_the_run():
    """A single step whose logits are NaN is refused as often as it is tried; a forced token does not hide it."""
    case = cases()["decay"]
    bad = sc.load((case.backend, jax.tree.map(lambda leaf: leaf * np.nan, case.params)))
    gen = sc.Generation(sc.Runtime(bad, capacity=64), [1, 2, 3], max_tokens=20, num_logprobs=0)
    for _ in range(2):
        with pytest.raises(sc.NonFiniteError):
            gen.step()
        assert gen.tokens == [] and gen.status is Status.PREPARED
    gen.force(4)
    with pytest.raises(sc.NonFiniteError):
        gen.step()
    gen.restore(gen.snapshot())
    with pytest.raises(sc.NonFiniteError):
        sc.beam_search(bad, [1, 2, 3], num_beams=2, num_tokens=3)


# Speculation beside guards and boundaries.


class Right:
    """A draft that is always right."""

    num_draft = 5

    def __init__(self, text):
        self.text = text

    def propose(self, history, limit):
        return self.text[len(history) : len(history) + limit]


def test_a_guard_sees_the_same_with_speculation():
    full = alone(0, max_tokens=60).run(60)
    ends = []
    for speculate in (None, Right(PROMPTS[0] + full)):
        gen = alone(0, max_tokens=60, guard=LoopGuard(max_period=8))
        gen.run(60, speculate=speculate)
        ends.append((gen.tokens, gen.finish))
    assert ends[0] == ends[1]


def test_boundaries_are_the_same_with_speculation():
    full = alone(0, sampler=WARM, seed=2, max_tokens=40).run(40)
    found = []
    for speculate in (None, Right(PROMPTS[0] + full)):
        gen = alone(0, sampler=WARM, seed=2, max_tokens=60, boundaries=MASK, boundary_slots=8)
        gen.run(40, speculate=speculate)
        found.append((gen.rollback_to_boundary(1), gen.tokens))
    assert found[0][1] == found[1][1] and found[0][0].target == found[1][0].target


@pytest.mark.parametrize("override", [{"mirostat": sc.Mirostat()}, {"mirostat": None}], ids=["on", "off"])
def test_going_back_over_a_switch_of_mirostat(override):
    """Its mu is taken back only where there was one and is one."""
    before = None if override["mirostat"] else sc.Mirostat()
    sampler = sc.Sampler(temperature=1.0, mirostat=before)
    gen = alone(0, sampler=sampler, max_tokens=60, boundaries=np.ones(16, bool), boundary_slots=8)
    gen.run(10)
    gen.override(**override)
    assert gen.rollback_to_boundary(2).decline is None
    assert len(gen.run(5)) == 5


# Streams, kinds, books.


def test_a_stream_is_of_one_run():
    """What moves the run in between is noticed, since the text told would not go on."""
    gen = alone(0, max_tokens=20)
    snap = gen.snapshot()
    branch = gen.fork(snap)
    moves = [lambda: gen.run(1), lambda: gen.restore(snap), lambda: gen.exchange(branch)]
    for move in moves:
        pieces = gen.stream()
        next(pieces)
        move()
        with pytest.raises(sc.LifecycleError, match="another stream"):
            list(pieces)
    for wrong in (0, -3, 1.5, "a", True):
        with pytest.raises(sc.LifecycleError):
            gen.stream(wrong)
    gen.run(20)
    with pytest.raises(sc.LifecycleError, match="complete"):
        gen.stream()


@pytest.mark.parametrize(("ask", "status"), [("pause", Status.PAUSED), ("cancel", Status.CANCELLED)])
def test_a_stream_ends_where_it_is_asked_to(ask, status):
    """Asked between two pieces, from the loop that reads them; nothing is lost, and a pause is sticky."""
    wanted = alone(0, max_tokens=12).run(12)
    gen = alone(0, max_tokens=12)
    pieces = []
    for piece in gen.stream():
        pieces.append(piece.token)
        if len(pieces) == 5:
            getattr(gen.control, ask)()
    assert pieces == wanted[:5] and gen.status is status
    if ask == "pause":
        gen.resume()
        assert gen.run(12) == wanted[5:]


def test_a_guard_that_cannot_go_back_ends_the_text():
    """A window of drafts has overwritten the ring's rows: the guard ends the text, and the run does not fail."""

    class Deep:
        num_draft = 8

        def propose(self, history, limit):
            return [9] * limit

    mask = np.zeros(10, bool)
    mask[7] = True
    gen = alone(0, "digit", max_tokens=60, boundaries=mask, boundary_slots=4, guard=LoopGuard(max_period=1))
    gen.force(7)
    gen.run(1)
    for _ in range(20):
        gen.force(len(gen.tokens) % 6)
        gen.run(1)
    for _ in range(3):
        gen.force(9)
        gen.run(1, speculate=Deep()) if gen.num_left else None
    assert gen.finish is Finish.LOOP and gen.status is Status.COMPLETED


def test_snapshots_and_branches_are_not_taken_for_each_other():
    gen = start(max_tokens=10)
    snap = gen.snapshot()
    branch, before = gen.fork(snap), record(gen)
    calls = [lambda: gen.exchange(snap), lambda: gen.restore(branch), lambda: gen.fork(branch), lambda: gen.restore(5)]
    for call in calls:
        with pytest.raises(sc.GeometryError):
            call()
        assert_record(gen, before)
    gen.restore(snap)
    gen.exchange(branch)


def test_a_refused_restore_leaves_an_open_window_open():
    gen = start(max_tokens=10)
    snap = gen.snapshot()
    gen.exchange(gen.fork(snap))
    version = gen.runtime.version
    with pytest.raises(sc.IdentityError):
        gen.restore(snap)
    assert gen.runtime.version == version


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": 0.7},
        {"constraint": 5},
        {"prefix_cache": 5},
        {"guard": 5},
        {"guard": LoopGuard(max_period=0)},
        {"guard": LoopGuard(num_repeats=0)},
        {"stop_tokens": None},
        {"stop_tokens": 5.5},
        {"stop_strings": 5},
        {"boundary_slots": "a"},
        {"boundary_slots": -1},
        {"seed": True},
    ],
    ids=str,
)
def test_arguments_of_another_kind(options):
    gen = start(max_tokens=6)
    before = host(gen.runtime.state)
    with pytest.raises(sc.StateError):
        sc.Generation(gen.runtime, PROMPTS, **options)
    assert_bits(before, gen.runtime.state)
    with pytest.raises(sc.UnsupportedError):
        gen.run(1, speculate=5)


def test_a_constraint_that_is_complete_already():
    done = OneOf([[1]], vocab_size=16)
    done.advance(1)
    with pytest.raises(sc.UnsupportedError, match="complete already"):
        start(constraint=[None, done])


def test_a_draft_outside_the_vocabulary_costs_time_alone():
    class Wild:
        num_draft = 3

        def propose(self, history, limit):
            return [99, -1, 2**40][:limit]

    wanted = start(max_tokens=8).run(8)
    assert start(max_tokens=8).run(8, speculate=Wild()) == wanted


def test_dropped_runs_keep_their_length_in_the_tree():
    gen = start(max_tokens=30)
    branch = gen.fork(gen.snapshot())
    gen.exchange(branch)
    gen.run(7)
    kept = gen.snapshot()
    gen.exchange(branch)
    del branch
    gc.collect()
    (child,) = gen.tree().root.children
    assert (child.num_tokens, child.status, child.snapshots) == (7, None, (7,)) and kept


def test_best_of_n_refuses_scores_that_cannot_be_compared():
    gen = alone(0, sampler=WARM, max_tokens=30)
    before = record(gen)
    for wrong in (float("nan"), None):
        with pytest.raises(sc.UnsupportedError, match="score"):
            sc.best_of_n(gen, 2, 4, score=lambda *args, wrong=wrong: wrong)
        assert_record(gen, before)

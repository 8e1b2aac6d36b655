"""Everything a generation does, in any order, against the replay of each run from its beginning."""

import gc

import numpy as np
import pytest
from generations import PROMPTS, WARM, start
from helpers import cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import statecore as sc
from statecore import testing
from statecore.generation import Status

MAX_TOKENS = 40
DRAFT = sc.NGramDraft(num_draft=4)
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.8}, {"seed": 3}, {"presence_penalty": 0.5}]
GOING = (Status.PREPARED, Status.PAUSED)


def begin(name):
    return start(name, sampler=WARM, seed=0, max_tokens=MAX_TOKENS)


def replay(name, log):
    """Returns a generation in which the operations of one run were done again, windows as single tokens."""
    gen = begin(name)
    for operation, *arguments in log:
        if operation == "run":
            gen.run(*arguments)
        elif operation == "force":
            gen.force(*arguments)
        elif operation == "override":
            gen.override(**arguments[0])
        elif operation == "patch":
            gen.patch("h", lambda h: h + 1)
    return gen


def is_going(machine):
    return machine.gen.status in GOING


class GenerationMachine(RuleBasedStateMachine):
    """Each logical run has a log of what was done to it; at the end, each must be what its log gives."""

    name = "digit"

    def __init__(self):
        super().__init__()
        self.gen, self.log, self.run = begin(self.name), [], 0
        self.gen.enable_snapshots(sc.SnapshotLimits())
        self.num_runs = 1
        self.snaps = []  # snapshot, log, run
        self.branches = []  # branch, log, run

    @precondition(is_going)
    @rule(num_tokens=st.integers(1, 5), speculate=st.sampled_from([None, DRAFT]))
    def emit(self, num_tokens, speculate):
        self.gen.run(num_tokens, speculate=speculate)
        self.log.append(("run", num_tokens))

    @precondition(lambda self: is_going(self) and self.gen._run.forced.array() is None)
    @rule(token=st.integers(0, 9), row=st.integers(0, 1))
    def force(self, token, row):
        self.gen.force(token, row)
        self.log.append(("force", token, row))

    @precondition(is_going)
    @rule(
        settings=st.sampled_from([{"temperature": 0.0}, {"temperature": 0.8}, {"seed": 3}, {"presence_penalty": 0.5}])
    )
    def override(self, settings):
        self.gen.override(**settings)
        self.log.append(("override", settings))

    @precondition(is_going)
    @rule()
    def patch(self):
        self.gen.patch("h", lambda h: h + 1)
        self.log.append(("patch",))

    @precondition(lambda self: self.gen.status in (*GOING, Status.COMPLETED) and len(self.snaps) < 4)
    @rule()
    def snapshot(self):
        self.snaps.append((self.gen.snapshot(), list(self.log), self.run))

    @precondition(lambda self: self.snaps)
    @rule(data=st.data())
    def restore(self, data):
        snapshot, log, run = data.draw(st.sampled_from(self.snaps))
        if run != self.run:
            with pytest.raises(sc.IdentityError):
                self.gen.restore(snapshot)
        elif self.gen.status is Status.CANCELLED:
            with pytest.raises(sc.LifecycleError):
                self.gen.restore(snapshot)
        else:
            epoch = self.gen.epoch
            self.gen.restore(snapshot)
            self.log = list(log)
            assert self.gen.epoch == epoch + 1

    @precondition(lambda self: self.snaps and len(self.branches) < 3)
    @rule(data=st.data(), seed=st.sampled_from([None, 5]))
    def fork(self, data, seed):
        snapshot, log, _ = data.draw(st.sampled_from(self.snaps))
        branch = self.gen.fork(snapshot, seed=seed)
        # A seed replaces the key alone, so that on the replay it is an override.
        more = [] if seed is None else [("override", {"seed": seed})]
        self.branches.append((branch, [*log, *more], self.num_runs))
        self.num_runs += 1

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def exchange(self, data):
        place = data.draw(st.integers(0, len(self.branches) - 1))
        branch, log, run = self.branches[place]
        self.gen.exchange(branch)
        self.branches[place] = branch, self.log, self.run
        self.log, self.run = log, run

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def drop(self, data):
        place = data.draw(st.integers(0, len(self.branches) - 1))
        del self.branches[place]

    @precondition(is_going)
    @rule()
    def pause(self):
        self.gen.pause()
        for call in (self.gen.step, lambda: self.gen.run(2, speculate=DRAFT)):
            with pytest.raises(sc.LifecycleError, match="paused"):
                call()
        self.gen.resume()

    @precondition(lambda self: is_going(self) and self.branches)
    @rule(by_control=st.booleans())
    def cancel(self, by_control):
        if by_control:
            self.gen.control.cancel()
        else:
            self.gen.cancel()
        with pytest.raises(sc.LifecycleError, match="cancelled"):
            self.gen.step()

    @invariant()
    def the_books_are_right(self):
        gc.collect(0)
        gen, usage = self.gen, self.gen.usage
        outputs = gen.tokens
        assert gen.runtime.lengths.tolist() == [len(p) + len(o) - 1 for p, o in zip(PROMPTS, outputs, strict=True)]
        assert usage.snapshots == len(self.snaps)
        charged = sum(branch.reservation is not None for branch, _, _ in self.branches)
        assert usage.branches == charged + (gen._reservation is not None)
        assert gen.tree().num_runs == 1 + len(self.branches)
        if not gen.runtime.is_patched:
            fed = [(prompt + output)[:-1] for prompt, output in zip(PROMPTS, outputs, strict=True)]
            assert str(testing.digit_rows(gen.runtime.state)) == str(testing.digit_oracle(fed))

    def teardown(self):
        backend = cases()[self.name].backend
        for place in range(len(self.branches) + 1):
            if place:
                self.gen.exchange(self.branches[place - 1][0])
                self.log = self.branches[place - 1][1]
            wanted = replay(self.name, self.log)
            assert self.gen.tokens == wanted.tokens
            assert sc.equal(backend, self.gen.runtime.state, wanted.runtime.state)
            np.testing.assert_array_equal(self.gen.runtime.is_patched, wanted.runtime.is_patched)


def test_any_order_of_operations():
    """NC5, NC6, NC10, ND1-ND6, NE2-NE4, NF1, NF2: 60 runs of 40 rules; each run ends as its log alone would."""
    machine = type("Machine", (GenerationMachine,), {})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
    machine.TestCase("runTest").runTest()

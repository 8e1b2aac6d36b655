"""Every operation on a sequence in any order, against a history that is only a list of tokens."""

import numpy as np
import pytest
from helpers import cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import statecore as sc
from statecore import ssm, testing

CAPACITY = 64
WIDTH = 5


class SequenceMachine(RuleBasedStateMachine):
    """The digit model's state spells its history, so each state is read, never trusted."""

    name, strategy = "digit", "select"

    def __init__(self):
        super().__init__()
        self.case = self.make_case()
        state = self.case.backend.init(self.case.params, batch=2, capacity=CAPACITY)
        self.seq = ssm.begin(self.case.backend, state, ring_slots=3, strategy=self.strategy)
        self.history = [[], []]
        self.kept = None  # the history at the checkpoint
        self.window = None  # tokens and valid counts of the open window
        self.saves = {}  # by ring slot
        self.captured = None

    def make_case(self):
        return cases()[self.name]

    def check_state(self):
        assert str(testing.digit_rows(self.seq.state)) == str(testing.digit_oracle(self.history))

    def room(self):
        return CAPACITY - max(map(len, self.history))

    @precondition(lambda self: self.window is None and self.room() > 0)
    @rule(tokens=st.lists(st.integers(0, 9), min_size=2, max_size=2), donate=st.booleans())
    def step(self, tokens, donate):
        # A donated state that is captured elsewhere by reference would be gone: captures are copies.
        self.seq, _ = ssm.step(self.case.params, self.seq, tokens, donate=donate)
        for row, token in zip(self.history, tokens, strict=True):
            row.append(token)

    @precondition(lambda self: self.window is None)
    @rule()
    def checkpoint(self):
        self.seq = ssm.start_checkpoint(self.seq)
        self.kept = [list(row) for row in self.history]

    @precondition(lambda self: self.window is None and self.room() >= WIDTH)
    @rule(data=st.data(), donate=st.booleans())
    def extend(self, data, donate):
        tokens, valid = self.draw_rows(data)
        self.seq, _ = ssm.extend(self.case.params, self.seq, tokens, num_valid=valid, donate=donate)
        self.window = tokens, valid
        self.resolve(valid)

    @precondition(lambda self: self.window is None and self.room() >= WIDTH)
    @rule(data=st.data(), donate=st.booleans())
    def verify(self, data, donate):
        tokens, valid = self.draw_rows(data)
        self.seq, _ = ssm.verify(self.case.params, self.seq, tokens, num_valid=valid, donate=donate)
        self.window = tokens, valid

    def draw_rows(self, data):
        tokens = np.array(data.draw(st.lists(st.integers(0, 9), min_size=2 * WIDTH, max_size=2 * WIDTH)))
        return tokens.reshape(2, WIDTH), data.draw(st.lists(st.integers(0, WIDTH), min_size=2, max_size=2))

    @precondition(lambda self: self.window is not None)
    @rule(data=st.data(), donate=st.booleans())
    def commit(self, data, donate):
        tokens, valid = self.window
        counts = [data.draw(st.integers(min(1, most), most)) for most in valid]
        self.seq = ssm.commit_accepted_prefix(self.seq, counts, WIDTH, donate=donate)
        self.resolve(counts)

    @precondition(lambda self: self.window is not None and self.kept == self.history)
    @rule(data=st.data(), again=st.booleans(), donate=st.booleans())
    def rollback(self, data, again, donate):
        counts = [data.draw(st.integers(0, most)) for most in self.window[1]]
        if again:
            self.seq = ssm.sync(ssm.start_rollback_and_checkpoint(self.seq, counts))
        else:
            self.seq = ssm.rollback(self.seq, counts, donate=donate)
        self.resolve(counts)
        if again:
            self.kept = [list(row) for row in self.history]

    def resolve(self, counts):
        tokens, _ = self.window
        for row, (new, count) in enumerate(zip(tokens, counts, strict=True)):
            self.history[row] += new[:count].tolist()
        self.window = None

    @precondition(lambda self: self.window is None)
    @rule()
    def back_to_the_checkpoint(self):
        try:
            self.seq = ssm.rollback(self.seq, 0)
        except sc.RollbackError as refusal:
            # Without a checkpoint, or where the ring's rows are gone.
            assert self.kept is None or "highest" in str(refusal)
            return
        self.go_back(self.kept)

    @precondition(lambda self: self.window is None and len(set(map(len, self.history))) == 1)
    @rule()
    def save(self):
        self.seq = ssm.save_ring(self.seq)
        newest = self.seq.ring.entries[-1]
        self.saves[newest.slot] = [list(row) for row in self.history]
        assert len(self.saves) <= 3

    @precondition(lambda self: self.window is None and self.saves)
    @rule(data=st.data())
    def restore(self, data):
        slot = data.draw(st.sampled_from(sorted(self.saves)))
        try:
            self.seq = ssm.restore_ring(self.seq, slot)
        except sc.RollbackError as refusal:
            assert "highest" in str(refusal)
            return
        self.go_back(self.saves[slot])

    def go_back(self, history):
        """What was kept of tokens that are gone is gone too."""
        self.history = [list(row) for row in history]
        shortest = min(map(len, self.history))
        self.saves = {slot: saved for slot, saved in self.saves.items() if len(saved[0]) <= shortest}
        if self.kept is not None and any(len(a) > len(b) for a, b in zip(self.kept, self.history, strict=True)):
            self.kept = None

    @precondition(lambda self: self.window is None)
    @rule()
    def capture(self):
        self.captured = sc.capture(self.seq.state), [list(row) for row in self.history]

    @precondition(lambda self: self.window is None and self.captured is not None)
    @rule()
    def exchange(self):
        """The captured state runs on as a new sequence, and the old one is captured."""
        state, history = self.captured
        live, saved = sc.exchange(self.seq.state, state)
        self.captured = sc.capture(saved), self.history
        self.seq = ssm.begin(self.case.backend, live, tokens=history, ring_slots=3, strategy=self.strategy)
        self.history, self.kept, self.saves = [list(row) for row in history], None, {}

    @precondition(lambda self: self.window is None)
    @rule(rows=st.sampled_from([[1, 0], [0, 0], [1, 1]]))
    def reorder(self, rows):
        self.seq = ssm.take_rows(self.seq, rows)
        self.history = [list(self.history[row]) for row in rows]
        self.kept = None if self.kept is None else [list(self.kept[row]) for row in rows]
        self.saves = {slot: [list(saved[row]) for row in rows] for slot, saved in self.saves.items()}

    @invariant()
    def the_state_spells_the_history(self):
        assert [row.tolist() for row in self.seq.tokens] == self.history
        self.check_state()
        assert sorted(self.seq.saved) == sorted(entry.slot for entry in self.seq.ring.entries) == sorted(self.saves)


class TinyMachine(SequenceMachine):
    """The embedded model: its state must be what reading the history afresh gives, up to rounding."""

    def make_case(self):
        return self.model

    def check_state(self):
        model, backend = self.model, self.model.backend
        empty = backend.init(model.params, batch=2, capacity=CAPACITY)
        padded = np.array([row + [0] * (CAPACITY - len(row)) for row in self.history])
        read, _ = sc.extend(backend, model.params, empty, padded, num_valid=list(map(len, self.history)), logits="none")
        testing.assert_same(backend, self.seq.state, read, law="any order", case=str(self.history), tolerance=2e-5)


def run_machine(base, **attributes):
    machine = type("Machine", (base,), attributes)
    machine.TestCase.settings = settings(max_examples=attributes["runs"], stateful_step_count=50)
    machine.TestCase("runTest").runTest()


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("digit", "select", marks=pytest.mark.slow),
        ("digit-own", "replay"),
        pytest.param("digit", "rerun", marks=pytest.mark.slow),
    ],
)
def test_any_order_of_operations(name, strategy):
    """S12, S14, S23, S46: 70 runs of 50 rules for each of three strategies."""
    run_machine(SequenceMachine, name=name, strategy=strategy, runs=70)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "runs"), [("replay", 200), ("select", 40), ("rerun", 40)])
def test_any_order_of_operations_on_the_embedded_model(tiny, strategy, runs):
    """S12, S14, S23, S46: 200 runs of 50 rules with its own verify and replay, 40 for each other strategy."""
    run_machine(TinyMachine, model=tiny, strategy=strategy, runs=runs)

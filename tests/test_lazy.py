"""Law 4 over any sequence of operations: captures of each mode, against what NumPy says they hold."""

import dataclasses

import jax
import numpy as np
from helpers import CAPACITY, cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import statecore as sc
from statecore.testing._digit import digit_oracle, digit_rows

MODES = st.sampled_from(["fresh", "lazy", "compact"])
TOKENS = st.lists(st.integers(0, 9), min_size=2, max_size=2)
NUMBERS = st.integers(0, 5)


@dataclasses.dataclass
class Saved:
    slot: sc.Slot
    histories: list[list[int]]


class Captures(RuleBasedStateMachine):
    """Two runtimes of one load and any number of slots; each spells what it was fed, or is wrong."""

    def __init__(self):
        super().__init__()
        case = cases()["digit-own"]
        self.runtimes = [sc.Runtime(MODEL[0], batch=2, capacity=CAPACITY) for _ in range(2)]
        self.fed: list[list[list[int]]] = [[[], []], [[], []]]
        self.saved: list[Saved] = []
        self.case = case

    def room(self, which: int) -> int:
        return CAPACITY - max(map(len, self.fed[which]))

    @rule(which=st.integers(0, 1), tokens=TOKENS)
    def step(self, which, tokens):
        if self.room(which):
            self.runtimes[which].step(tokens)
            self.fed[which] = [row + [token] for row, token in zip(self.fed[which], tokens, strict=True)]

    @rule(which=st.integers(0, 1), tokens=TOKENS, live=st.lists(st.booleans(), min_size=2, max_size=2))
    def step_live(self, which, tokens, live):
        if self.room(which):
            logits = np.array(self.runtimes[which].step(tokens, live=live))
            assert np.isnan(logits).all(axis=1).tolist() == [not alive for alive in live]
            self.fed[which] = [
                row + [token] * alive for row, token, alive in zip(self.fed[which], tokens, live, strict=True)
            ]

    @rule(which=st.integers(0, 1), rows=st.lists(TOKENS, min_size=4, max_size=4), kept=st.tuples(NUMBERS, NUMBERS))
    def verify_and_commit(self, which, rows, kept):
        if self.room(which) < 4:
            return
        window, kept = np.array(rows).T, [min(number, 4) for number in kept]
        self.runtimes[which].verify(window)
        self.check()  # a verify writes what a lazy slot refers to elsewhere
        self.runtimes[which].commit(kept)
        self.fed[which] = [
            row + new[:number].tolist() for row, new, number in zip(self.fed[which], window, kept, strict=True)
        ]

    @rule(which=st.integers(0, 1), mode=MODES)
    def capture(self, which, mode):
        slot = self.runtimes[which].capture(mode=mode)
        assert slot.is_settled == (mode != "lazy")
        self.saved.append(Saved(slot, [list(row) for row in self.fed[which]]))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1), number=NUMBERS, mode=st.sampled_from(["fresh", "compact"]))
    def copy(self, which, number, mode):
        saved = self.saved[number % len(self.saved)]
        copied = self.runtimes[which].copy(saved.slot, mode=mode)
        assert copied.is_settled
        self.saved.append(Saved(copied, saved.histories))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1), number=NUMBERS)
    def capture_into(self, which, number):
        saved = self.saved.pop(number % len(self.saved))
        try:
            slot = self.runtimes[which].capture(into=saved.slot)
        except sc.AliasError:
            assert not saved.slot.is_settled
            self.saved.append(saved)
        except sc.GeometryError:
            assert saved.slot.num_rows is not None
            self.saved.append(saved)
        else:
            self.saved.append(Saved(slot, [list(row) for row in self.fed[which]]))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1), number=NUMBERS)
    def exchange(self, which, number):
        saved = self.saved.pop(number % len(self.saved))
        held = self.runtimes[which].exchange(saved.slot)
        self.saved.append(Saved(held, self.fed[which]))
        self.fed[which] = [list(row) for row in saved.histories]

    @precondition(lambda self: self.saved)
    @rule(number=NUMBERS)
    def drop(self, number):
        self.saved.pop(number % len(self.saved))

    @rule(which=st.integers(0, 1))
    def reset(self, which):
        self.runtimes[which].reset()
        self.fed[which] = [[], []]

    @invariant()
    def check(self):
        held = [(saved.slot.state, saved.histories) for saved in self.saved]
        held += [(runtime.state, fed) for runtime, fed in zip(self.runtimes, self.fed, strict=True)]
        for state, histories in held:
            for found, wanted in zip(digit_rows(state), digit_oracle(histories), strict=True):
                for name, value in wanted.items():
                    np.testing.assert_array_equal(found[name], value, err_msg=name)
        # Who says that it is settled has its buffers alone.
        pointers = [[leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] for state, _ in held]
        for number, saved in enumerate(self.saved):
            others = {p for other, row in enumerate(pointers) if other != number for p in row}
            assert saved.slot.is_settled == others.isdisjoint(pointers[number])


MODEL = [sc.load((cases()["digit-own"].backend, None))]
Captures.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestCaptures = Captures.TestCase

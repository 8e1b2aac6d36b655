"""One logical run of a generation: everything but the state of the model."""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np

from statecore._errors import LifecycleError
from statecore._identity import Mark
from statecore.backend import Tokenizer
from statecore.generation._boundary import BoundarySaves
from statecore.generation._clock import Clock
from statecore.generation._constraint import Constraint
from statecore.generation._draft import DraftState, StatefulDraft
from statecore.generation._forced import Forced
from statecore.generation._guard import LoopGuard
from statecore.generation._lifecycle import Lifecycle, Status
from statecore.generation._pace import Pace
from statecore.generation._row import Finish, Row
from statecore.generation._sampler import Sampler
from statecore.generation._sampler_state import SamplerState, initial_state
from statecore.generation._stops import Stops
from statecore.native import Estimate
from statecore.ssm import Decision


class RunId(Mark):
    """Marks one logical run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """What speculation has done so far in a run.

    num_verifies: windows verified, counted once a sequence that had rows in it.
    num_tokens: tokens those windows emitted.
    num_drafted: draft tokens verified.
    num_accepted: draft tokens accepted.
    drafted_at: how often a draft stood at each place of a window, the first after the anchor first.
    accepted_at: how often it was accepted there.
    mode: of the verifies: `exact`, `fast`, or `mixed` if both were used; None before the first.
    """

    num_verifies: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    mode: str | None = None

    def counted(self, drafted: np.ndarray, num_rows: np.ndarray, mode: str) -> "Speculation":
        """Returns this with windows that had `drafted` drafts and emitted `num_rows` tokens, -1 and 0 for none."""
        live, most = drafted >= 0, np.arange(max(int(drafted.max()), 0))
        drafted_at, accepted_at = ((most < part[live, None]).sum(axis=0) for part in (drafted, num_rows - 1))
        return self.merged(int(live.sum()), int(num_rows[live].sum()), drafted_at, accepted_at, mode)

    def merged(
        self, num_verifies: int, num_tokens: int, drafted_at: np.ndarray, accepted_at: np.ndarray, mode: str
    ) -> "Speculation":
        """Returns this with the counts of other windows added."""
        if not num_verifies:
            return self
        return Speculation(
            num_verifies=self.num_verifies + num_verifies,
            num_tokens=self.num_tokens + num_tokens,
            num_drafted=self.num_drafted + int(drafted_at.sum()),
            num_accepted=self.num_accepted + int(accepted_at.sum()),
            drafted_at=_added(self.drafted_at, drafted_at),
            accepted_at=_added(self.accepted_at, accepted_at),
            mode=mode if self.mode in (None, mode) else "mixed",
        )

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens a verify emits; 1 is what plain decoding does. NaN before the first."""
        return self.num_tokens / self.num_verifies if self.num_verifies else float("nan")


def _added(a: tuple[int, ...], b: np.ndarray) -> tuple[int, ...]:
    return tuple(x + y for x, y in itertools.zip_longest(a, b.tolist(), fillvalue=0))


class Unread(NamedTuple):
    """The logits `[B, V]` of a step from which no token was drawn, and the rows `live` `[B]` that took it."""

    logits: jax.Array
    live: np.ndarray


@dataclasses.dataclass(kw_only=True)
class Run:
    """The semantic half of a generation.

    rows: its sequences.
    sampler: how tokens are chosen.
    sampling: what the sampler carries: key, counts, Mirostat's mu. Immutable.
    forced: tokens that come next whatever the logits say. Immutable.
    stops: what ends a sequence.
    max_tokens: tokens to emit in all, for each sequence.
    run_id: which logical run this is; a snapshot can only be restored into its own.
    num_logprobs: None for no log-probabilities, else how many of the likeliest to keep.
    lifecycle: where it is in its life.
    speculation: counts so far.
    num_rollbacks: how often it went back to a boundary.
    is_streamed: whether tokens have left and cannot be taken back.
    saves: boundaries to go back to; None if they are not known.
    guard: notices a text that loops; None for none.
    pace: how far drafts pay.
    clock: times the parts of rounds on the host; None almost always.
    drafted: the state of each draft that has one; copied with the run by `detach`.
    proposed: the draft's state between a proposal and what came of it; None almost always.
    unread: logits of a step whose tokens could not be drawn; None almost always.
    """

    rows: list[Row]
    sampler: Sampler
    sampling: SamplerState
    forced: Forced
    stops: Stops
    max_tokens: int
    run_id: RunId
    num_logprobs: int | None = None
    lifecycle: Lifecycle = Lifecycle()
    speculation: Speculation = Speculation()
    num_rollbacks: int = 0
    is_streamed: bool = False
    saves: BoundarySaves | None = None
    guard: LoopGuard | None = None
    pace: Pace = Pace()
    clock: Clock | None = None
    drafted: dict[StatefulDraft, DraftState] = dataclasses.field(default_factory=dict)
    proposed: DraftState | None = None
    unread: Unread | None = None

    def copy(self, **changes) -> "Run":
        """Returns a copy with some fields changed, independent but for the states of drafts: see `detach`."""
        rows, drafted = [row.copy() for row in self.rows], dict(self.drafted)
        return dataclasses.replace(
            self, **({"rows": rows, "drafted": drafted, "proposed": None, "clock": None} | changes)
        )

    def detach(self) -> "Run":
        """Copies the states of the drafts, which a copy of this run has too; returns this run."""
        self.drafted = {draft: state.copy() for draft, state in self.drafted.items()}
        return self

    @property
    def prompts(self) -> list[list[int]]:
        """Tokens of each sequence's prompt."""
        return [row.prompt for row in self.rows]

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens each sequence has emitted, not to be changed."""
        return [row.output for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens each sequence has emitted, as lists of their own."""
        return [list(row.output) for row in self.rows]

    @property
    def constraints(self) -> list[Constraint | None]:
        """What binds each sequence that goes on; None for none."""
        return [None if row.finish else row.constraint for row in self.rows]

    @property
    def num_emitted(self) -> int:
        """Tokens emitted by the sequence that has emitted most."""
        return max(len(row.output) for row in self.rows)

    @property
    def num_left(self) -> int:
        """The most tokens that a sequence may still emit; 0 once all have ended."""
        left = [0 if row.finish else self.max_tokens - len(row.output) for row in self.rows]
        return max(left)

    @property
    def live(self) -> np.ndarray:
        """Which sequences have not ended, `[B]` bool."""
        return np.array([row.finish is None for row in self.rows])

    def pending(self) -> np.ndarray:
        """Returns the last token of each sequence, `[B]`: emitted, not yet in the state."""
        return np.array([row.pending for row in self.rows], np.int32)

    def state_lengths(self) -> np.ndarray:
        """Returns how many tokens of each sequence the state must hold, `[B]`."""
        lengths = np.array([row.state_length for row in self.rows])
        # A step that nothing was drawn from has put the pending token into the state.
        return lengths if self.unread is None else lengths + self.unread.live

    def is_in(self, lengths: np.ndarray) -> bool:
        """Returns whether a state of `lengths` `[B]` holds as many tokens of each sequence as it must."""
        if self.unread is None:  # without an array, since each exchange asks
            return list(lengths) == [row.state_length for row in self.rows]
        return np.array_equal(lengths, self.state_lengths())

    def num_inputs(self) -> list[int]:
        """Returns how many tokens of each sequence may still enter the state; the last one emitted never does."""
        goals = [len(row.prompt) + self.max_tokens - 1 for row in self.rows]
        triples = zip(self.rows, goals, self.state_lengths().tolist(), strict=True)
        return [0 if row.finish else max(0, goal - length) for row, goal, length in triples]

    def force(self, token: int, number: int, vocab_size: int) -> None:
        """Makes `token` the next of sequence `number`; see `Generation.force`."""
        forced = self.forced.force(number, token, vocab_size=vocab_size)
        row = self.rows[number]
        if row.finish is not None:
            raise LifecycleError(f"Sequence {number} has ended ({row.finish.value}), so no token can be forced on it.")
        if row.constraint is not None:
            self.forced.force(number, token, vocab_size=vocab_size, allowed=row.constraint.mask())
        self.forced = forced

    def breaks_at(self, output: list[int]) -> bool:
        """Returns whether something must be done after this output, so that a window ends there as a step would."""
        is_boundary = self.saves is not None and self.saves.ring.num_slots > 0 and bool(self.saves.mask[output[-1]])
        return is_boundary or (self.guard is not None and self.guard.period(output) is not None)

    def with_owners(self, native: Estimate | None) -> Estimate | None:
        """Returns the cost of a complete copy, `native` being the state's; None if a part is unknown."""
        sizes = [row.constraint.nbytes() for row in self.rows if row.constraint is not None]
        sizes += [state.nbytes for state in self.drafted.values()]
        known = [size for size in sizes if size is not None]
        if native is None or len(known) < len(sizes):
            return None
        copied = sum(known)
        shared = self.sampling.nbytes + (0 if self.saves is None else self.saves.nbytes)
        return dataclasses.replace(
            native,
            retained_bytes=native.retained_bytes + copied + shared,
            copy_bytes=native.copy_bytes + copied,
        )

    def forked(self, run_id: RunId, key: jax.Array | None, max_tokens: int) -> "Run":
        """Returns a child of this run: its own life, draws and limit."""
        child = self.copy(
            run_id=run_id,
            sampling=dataclasses.replace(self.sampling, key=key),
            max_tokens=max_tokens,
            lifecycle=self.lifecycle.fork(),
        )
        for row in child.rows:
            if row.finish in (None, Finish.LENGTH):
                row.finish = Finish.LENGTH if len(row.output) == max_tokens else None
        child.lifecycle = child.lifecycle.limited(is_complete=not child.live.any())
        return child

    def rolled_back(self, decision: Decision, vocab_size: int) -> "Run":
        """Returns this run at a boundary, to be drawn differently from there."""
        assert self.saves is not None
        # A draft follows what was emitted, and makes its state anew where that went back.
        run = self.copy(num_rollbacks=self.num_rollbacks + 1, saves=self.saves.truncated(decision), drafted={})
        run.rows[0].cut(decision.keep)
        run.forced, run.unread = Forced.none(1), None
        key = self.sampling.key
        # The same draws would write the same loop again.
        key = None if key is None else jax.random.fold_in(key, run.num_rollbacks)
        fresh = initial_state(self.sampler, key, run.prompts, run.outputs, vocab_size)
        saved = None if decision.slot is None else self.saves.held[decision.slot]
        mu = fresh.mu if saved is None or saved.mu is None or fresh.mu is None else saved.mu
        run.sampling = dataclasses.replace(fresh, mu=mu)
        status = Status.RUNNING if run.lifecycle.status is Status.RUNNING else Status.PAUSED
        run.lifecycle = dataclasses.replace(run.lifecycle, prediction=decision.keep, status=status)
        return run

    def text(self, tokenizer: Tokenizer) -> list[str]:
        """Returns the text emitted by each sequence, without what stopped it."""
        return [_visible(tokenizer, row, self.stops) for row in self.rows]


def _visible(tokenizer: Tokenizer, row: Row, stops: Stops) -> str:
    """Returns a sequence's text without the stop token or the stop string that ended it."""
    shown = row.output[:-1] if row.finish is Finish.STOP_TOKEN else row.output
    text = tokenizer.decode(list(shown))
    return stops.strings.scan("", text).text if row.finish is Finish.STOP_STRING else text

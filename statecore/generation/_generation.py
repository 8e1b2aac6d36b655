"""`Generation`: a runtime's state, a sampler, a pending token and a history, together."""

import dataclasses
from numbers import Integral

import jax
import numpy as np

from statecore._errors import BudgetError, CapacityError, IdentityError, LifecycleError, UnsupportedError
from statecore._identity import Mark
from statecore.generation._draft import Draft
from statecore.generation._prompt import Prompt, feed, prompt_rows
from statecore.generation._run import Run, RunId, Speculation
from statecore.generation._sampler import Sampler, check_sampler, choose, key_of
from statecore.generation._speculate import check_draft, propose, speculative_round
from statecore.native import Estimate, Reservation, SnapshotBudget, SnapshotLimits, SnapshotUsage
from statecore.runtime import Runtime, Slot


class Driver(Mark):
    """Marks one generation and its branches."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A complete generation at one point; immutable, restorable any number of times.

    slot: the model's state.
    run: history, sampler, key and pending token.
    driver: which generation it belongs to.
    reservation: what it holds of the budget, as long as it lives.
    """

    slot: Slot
    run: Run
    driver: Driver
    reservation: Reservation

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens emitted up to here, a list a sequence."""
        return [list(row) for row in self.run.outputs]


class Branch:
    """A generation that is not running now; `gen.exchange(branch)` lets it run."""

    def __init__(self, slot: Slot, run: Run, driver: Driver, reservation: Reservation | None):
        self._slot, self._run, self._driver, self._reservation = slot, run, driver, reservation

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens emitted by what this branch holds, a list a sequence."""
        return [list(row) for row in self._run.outputs]


class Generation:
    """Drives one runtime: starts it afresh, feeds the prompt, emits tokens.

    The runtime is driven by this generation alone; if anything else advances it, the
    generation refuses to go on.

    Args:
      runtime: whose installed state is replaced by a fresh one.
      prompt: text, token ids, or a list of either, one a sequence.
      sampler: how tokens are chosen; greedy if not given.
      seed: of the draws; an int, or a typed key.
      max_tokens: tokens to emit, for each sequence; None for as many as the capacity holds.
      lossless: verify with single steps, so that speculation has the bits of decoding.

    Raises:
      GeometryError: not one prompt a sequence, an empty one, or an unknown token.
      CapacityError: prompt and tokens do not fit the runtime's capacity.
      UnsupportedError: a sampler setting that means nothing, or text without a tokenizer.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Prompt,
        *,
        sampler: Sampler | None = None,
        seed: int | jax.Array = 0,
        max_tokens: int | None = None,
        lossless: bool = False,
    ):
        self.runtime, self.lossless = runtime, lossless
        rows = prompt_rows(prompt, runtime.geometry.batch, runtime.model.tokenizer)
        sampler = Sampler() if sampler is None else sampler
        check_sampler(sampler)
        self._run = Run(
            prompts=rows,
            outputs=[[] for _ in rows],
            sampler=sampler,
            key=key_of(seed),
            max_tokens=_checked_length(runtime, rows, max_tokens),
            run_id=RunId(),
        )
        self._driver = Driver()
        self._reservation: Reservation | None = None
        self._budget: SnapshotBudget | None = None
        runtime.check_prompt(rows)
        runtime.reset()
        runtime.driver = self._driver
        feed(runtime, [row[:-1] for row in rows])
        self._version = runtime.version

    def __repr__(self) -> str:
        run = self._run
        return f"Generation({self.runtime.model.name}, {run.num_emitted} of {run.max_tokens} tokens)"

    # What has been emitted.

    @property
    def text(self) -> str | list[str]:
        """The text emitted so far; a list, one a sequence, for a batch."""
        if self.runtime.model.tokenizer is None:
            raise UnsupportedError(f"{self.runtime.model.name} was loaded without a tokenizer; read `tokens`.")
        return self._shaped(self._run.text(self.runtime.model.tokenizer))

    @property
    def tokens(self) -> list:
        """The tokens emitted so far; a list a sequence for a batch."""
        return self._shaped([list(row) for row in self._run.outputs])

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted, for each sequence."""
        return self._run.num_left

    @property
    def speculation(self) -> Speculation:
        """What speculation has done so far."""
        return self._run.speculation

    # Going on.

    def step(self) -> int | list[int]:
        """Emits one token; a list, one a sequence, for a batch.

        Raises:
          LifecycleError: the generation is complete, or something else drove its runtime.
        """
        return self._shaped([row[0] for row in self._emit(1, None)])

    def run(self, num_tokens: int, *, speculate: Draft | None = None) -> list:
        """Emits up to `num_tokens` tokens, fewer only if `max_tokens` is reached.

        Args:
          num_tokens: for each sequence, at least 1.
          speculate: a draft; its guesses are verified, so the output is that of plain
            decoding (up to the rounding of a batched verify, unless `lossless`).

        Returns:
          the new tokens; a list a sequence for a batch.

        Raises:
          LifecycleError: the generation is complete, or something else drove its runtime.
          RollbackError: the draft is longer than a ring can undo.
        """
        return self._shaped(self._emit(num_tokens, speculate))

    def _emit(self, num_tokens: int, draft: Draft | None) -> list[list[int]]:
        self._check_driving()
        run = self._run
        if not isinstance(num_tokens, Integral) or num_tokens < 1:
            raise LifecycleError(f"{num_tokens} tokens were asked for; ask for a whole number of at least 1.")
        if run.num_left < 1:
            raise LifecycleError(f"The generation is complete: it has emitted all {run.max_tokens} tokens.")
        start = run.num_emitted
        goal = start + min(num_tokens, run.num_left)
        if draft is None:
            while run.num_emitted < goal:
                self._plain_step()
        else:
            check_draft(self.runtime, draft)
            mode = "exact" if self.lossless else None
            while run.num_emitted < goal:
                limits = [goal - len(row) for row in run.outputs]
                guesses = propose(run, draft, limits)
                if not any(guesses) and all(limits):
                    self._plain_step()
                    continue
                try:
                    speculative_round(self.runtime, run, guesses, limits, draft.num_draft + 1, mode)
                finally:
                    self._follow()
        return [row[start:goal] for row in run.outputs]

    def _plain_step(self) -> None:
        run = self._run
        logits = self.runtime.step(run.pending())
        emitted = np.array([[len(row)] for row in run.outputs])
        chosen = np.array(choose(run.sampler, run.key, emitted, logits[:, None]))
        for row, token in zip(run.outputs, chosen[:, 0].tolist(), strict=True):
            row.append(token)
        self._follow()

    # Snapshots and branches.

    def enable_snapshots(self, limits: SnapshotLimits) -> None:
        """Sets the limits of this generation and all its branches, once, before the first snapshot.

        Raises:
          LifecycleError: limits were set before, or a snapshot was taken without any.
        """
        if self._budget is not None:
            raise LifecycleError("Snapshots are enabled already; their limits are set once, before the first.")
        self._budget = SnapshotBudget(limits)

    @property
    def usage(self) -> SnapshotUsage:
        """What snapshots and branches take now."""
        return SnapshotUsage() if self._budget is None else self._budget.usage

    def snapshot(self) -> Snapshot:
        """Returns this point of the generation, complete and independent.

        Raises:
          BudgetError: the copy's cost is unknown or exceeds a limit; nothing was copied.
          LifecycleError: something else drove the runtime.
        """
        self._check_driving()
        reservation = self._reserve(self.runtime.estimate(), snapshots=1)
        slot = self.runtime.capture()
        return Snapshot(slot=slot, run=self._run.copy(), driver=self._driver, reservation=reservation)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to `snapshot`, which stays usable.

        Raises:
          IdentityError: it belongs to another generation, or to another branch of this one.
          BudgetError: the copy exceeds a limit.
          LifecycleError: another generation has taken over the runtime.

        It also mends a generation whose call was cut short, or whose runtime was moved by hand.
        """
        self._check_owner()
        self._check_driver(snapshot.driver)
        self.runtime.abandon()
        if snapshot.run.run_id is not self._run.run_id:
            raise IdentityError(
                "This snapshot belongs to another branch of the generation. Restore it where it was taken, or "
                "`fork` it."
            )
        reservation = self._reserve(self.runtime.estimate(snapshot.slot))
        # Everything that can fail comes first; the exchange is the last of it.
        staged, run = self.runtime.copy(snapshot.slot), snapshot.run.copy()
        self.runtime.exchange(staged)
        self._run, self._version = run, self.runtime.version
        reservation.release()

    def fork(self, snapshot: Snapshot, *, seed: int | jax.Array | None = None) -> Branch:
        """Returns a branch that goes on from `snapshot`. Runs nothing and draws nothing.

        Args:
          snapshot: of this generation or of one of its branches.
          seed: of the branch's draws from here on; the snapshot's if None.

        Raises:
          IdentityError: the snapshot belongs to another generation.
          BudgetError: the copy or the growth of the branch is unknown or exceeds a limit.
        """
        self._check_owner()
        self._check_driver(snapshot.driver)
        cost = self.runtime.estimate(snapshot.slot)
        growth = self.runtime.estimate_growth(snapshot.slot, snapshot.run.num_left)
        if growth is None or cost is None:
            raise BudgetError("What this branch may grow to is unknown, so it cannot run; the snapshot stays usable.")
        held = Estimate(retained_bytes=cost.retained_bytes + growth, copy_bytes=cost.copy_bytes)
        reservation = self._reserve(held, branches=1)
        changes = {"run_id": RunId()} if seed is None else {"run_id": RunId(), "key": key_of(seed)}
        slot = self.runtime.copy(snapshot.slot)
        return Branch(slot, snapshot.run.copy(**changes), self._driver, reservation)

    def exchange(self, branch: Branch) -> None:
        """Runs what `branch` held from now on; `branch` holds what ran until now. Moves no tensor.

        Raises:
          IdentityError: the branch belongs to another generation.
          LifecycleError: something else drove the runtime.
        """
        self._check_driving()
        self._check_driver(branch._driver)
        branch._slot = self.runtime.exchange(branch._slot)
        branch._run, self._run = self._run, branch._run
        branch._reservation, self._reservation = self._reservation, branch._reservation
        self._version = self.runtime.version

    # Inside.

    def _reserve(self, cost: Estimate | None, *, snapshots: int = 0, branches: int = 0) -> Reservation:
        if self._budget is None:
            self._budget = SnapshotBudget(SnapshotLimits())
        return self._budget.reserve(cost, snapshots=snapshots, branches=branches)

    def _shaped(self, rows: list):
        return rows[0] if len(rows) == 1 else rows

    def _follow(self) -> None:
        """Takes the runtime's new version as this run's, if the state holds what this run says."""
        if (self.runtime.lengths == self._run.state_lengths()).all():
            self._version = self.runtime.version

    def _check_owner(self) -> None:
        if self.runtime.driver is not self._driver:
            raise LifecycleError("Another generation was started in this runtime and drives it now.")

    def _check_driving(self) -> None:
        self._check_owner()
        if self.runtime.version != self._version:
            raise LifecycleError(
                "Something else has advanced or exchanged the runtime of this generation, or a call was cut short, so "
                "its state is no longer this text's. `restore` a snapshot; give each generation a runtime of its own."
            )

    def _check_driver(self, driver: Driver) -> None:
        if driver is not self._driver:
            raise IdentityError("This snapshot or branch belongs to another generation.")


def _checked_length(runtime: Runtime, rows: list[list[int]], max_tokens: int | None) -> int:
    """Returns the tokens to emit; the last one emitted never enters the state."""
    longest = max(len(row) for row in rows)
    if max_tokens is not None and not (isinstance(max_tokens, Integral) and max_tokens >= 1):
        raise CapacityError(f"max_tokens is {max_tokens}, but must be a whole number of at least 1.")
    capacity = runtime.token_capacity
    if capacity is None:
        if max_tokens is None:
            raise CapacityError("This model's state has no capacity to fill; say `max_tokens`.")
        return max_tokens
    room = capacity - (longest - 1)
    wanted = 1 if max_tokens is None else max_tokens
    if wanted > room:
        raise CapacityError(
            f"A prompt of {longest} tokens and {wanted} more need a capacity of {longest - 1 + wanted}, but the "
            f"runtime has {capacity}. Make a runtime of a larger capacity."
        )
    return room if max_tokens is None else max_tokens

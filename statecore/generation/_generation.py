"""`Generation`: a runtime's state, a sampler, pending tokens and a history, together."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from statecore._errors import LifecycleError, UnsupportedError
from statecore.generation._boundary import make_saves
from statecore.generation._constraint import Constraint
from statecore.generation._draft import AnyDraft
from statecore.generation._emit import Piece, emit, pieces
from statecore.generation._guard import LoopGuard
from statecore.generation._lifecycle import Status
from statecore.generation._prompt import Prompt, feed, prompt_rows
from statecore.generation._row import Finish
from statecore.generation._run import Speculation
from statecore.generation._sampler import Sampler
from statecore.generation._sampler_state import overridden
from statecore.generation._saved import SavedRuns
from statecore.generation._start import check_kinds, start_run
from statecore.generation._warm import WarmStart
from statecore.runtime import Runtime
from statecore.ssm import Decision
from statecore.state import patch
from statecore.store import PrefixCache


class Generation(SavedRuns):
    """Drives one runtime: starts it afresh, feeds the prompt, emits tokens.

    The runtime is driven by this generation alone; if anything else advances it, the
    generation refuses to go on. One thread drives a generation; `control` may be used
    from any.

    Args:
      runtime: whose installed state is replaced by a fresh one.
      prompt: text, token ids, or a list of either, one a sequence.
      sampler: how tokens are chosen; greedy if not given.
      seed: of the draws; an int, or a typed key. None only for a greedy sampler.
      max_tokens: tokens to emit, for each sequence; None for as many as the capacity holds.
      lossless: verify with single steps, so that speculation has the bits of decoding.
      stop_tokens: end a sequence; kept in `tokens`, not in `text`.
      stop_strings: end a sequence where its text first holds one; the text ends before it.
      constraint: what tokens may come next; one, or one a sequence.
      num_logprobs: None for no log-probabilities, else how many of the likeliest to keep too.
      prefix_cache: to start from and to keep states in.
      boundaries: `[V]` bool, tokens that end a line or a sentence (`ssm.boundary_mask`),
        for `rollback_to_boundary`.
      boundary_slots: boundaries whose recurrent state is kept to go back to.
      guard: notices a text that loops; it is rolled back to a boundary, or ended.

    Raises:
      GeometryError: not one prompt a sequence, an empty one, or an unknown token.
      CapacityError: prompt and tokens do not fit the runtime's capacity.
      UnsupportedError: a setting that means nothing, text without a tokenizer, or sampling
        without a seed.
      IdentityError: the prefix cache is another model's.

    Whatever is refused leaves the runtime as it was. What fails later, while the prompt is
    read (memory, the device, an interrupt), has replaced the state that ran before, since
    two would take twice the memory: the generation before then refuses to go on until it
    is restored to a snapshot, and its snapshots and branches stay usable.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Prompt,
        *,
        sampler: Sampler | None = None,
        seed: int | jax.Array | None = 0,
        max_tokens: int | None = None,
        lossless: bool = False,
        stop_tokens: Collection[int] = (),
        stop_strings: Collection[str] = (),
        constraint: Constraint | Sequence[Constraint | None] | None = None,
        num_logprobs: int | None = None,
        prefix_cache: PrefixCache | None = None,
        boundaries: np.ndarray | None = None,
        boundary_slots: int = 0,
        guard: LoopGuard | None = None,
    ):
        check_kinds(runtime=runtime, sampler=sampler, prefix_cache=prefix_cache, guard=guard)
        rows = prompt_rows(prompt, runtime.geometry.batch, runtime.model.tokenizer)
        run = start_run(
            runtime,
            rows,
            sampler=Sampler() if sampler is None else sampler,
            seed=seed,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            stop_strings=stop_strings,
            constraint=constraint,
            num_logprobs=num_logprobs,
            saves=make_saves(runtime, boundaries, boundary_slots),
            guard=guard,
        )
        super().__init__(runtime, run)
        self.lossless = lossless
        self.warm = None if prefix_cache is None else WarmStart(prefix_cache, runtime)
        runtime.reset()
        read = [0] * len(rows) if self.warm is None else self.warm.start(runtime, [row[:-1] for row in rows])
        feed(runtime, [row[start:-1] for row, start in zip(rows, read, strict=True)])
        if self.warm is not None:
            self.warm.keep(runtime, self._run)
        # Last: until then the generation before can still `restore`.
        self._version, runtime.driver = runtime.version, self._driver

    def __repr__(self) -> str:
        run = self._run
        return (
            f"Generation({self.runtime.model.name}, {run.num_emitted} of {run.max_tokens} tokens, {self.status.value})"
        )

    # What has been emitted.

    @property
    def text(self) -> str | list[str]:
        """The text emitted so far, without what stopped it; a list, one a sequence, for a batch."""
        if self.runtime.model.tokenizer is None:
            raise UnsupportedError(f"{self.runtime.model.name} was loaded without a tokenizer; read `tokens`.")
        return self._shaped(self._run.text(self.runtime.model.tokenizer))

    @property
    def tokens(self) -> list:
        """The tokens emitted so far; a list a sequence for a batch."""
        return self._shaped(self._run.tokens)

    @property
    def num_left(self) -> int:
        """The most tokens that a sequence may still emit."""
        return self._run.num_left

    @property
    def status(self) -> Status:
        """Where the run is in its life."""
        return self._run.lifecycle.status

    @property
    def epoch(self) -> int:
        """How often the run was restored."""
        return self._run.lifecycle.epoch

    @property
    def finish(self) -> Finish | None | list[Finish | None]:
        """Why the text has ended, None while it goes on; a list, one a sequence, for a batch."""
        return self._shaped([row.finish for row in self._run.rows])

    @property
    def logprobs(self) -> list:
        """Log-probabilities of the emitted tokens, by the model's own distribution."""
        return self._shaped([list(row.logprobs) for row in self._run.rows])

    @property
    def keeps_logprobs(self) -> bool:
        """Whether log-probabilities of emitted tokens are kept."""
        return self._run.num_logprobs is not None

    @property
    def top_logprobs(self) -> list:
        """At each place the likeliest tokens with their log-probabilities, likeliest first."""
        return self._shaped([list(row.top) for row in self._run.rows])

    @property
    def speculation(self) -> Speculation:
        """What speculation has done so far."""
        return self._run.speculation

    # Going on.

    def step(self) -> Any:
        """Emits one token; a list, one a sequence, for a batch: None for a sequence that has ended.

        Raises:
          LifecycleError: the run is complete, cancelled or paused, or something else drove its runtime.
        """
        emitted = self._emit(1, None)
        if not any(emitted):
            raise LifecycleError(f"No token was emitted: the run is {self.status.value}, on a request to its control.")
        return self._shaped([row[0] if row else None for row in emitted])

    def run(self, num_tokens: int, *, speculate: AnyDraft | None = None) -> list:
        """Emits up to `num_tokens` tokens, fewer where a sequence ends or a pause is asked for.

        Args:
          num_tokens: for each sequence, at least 1.
          speculate: a draft; its guesses are verified, so the output is that of plain
            decoding (up to the rounding of a batched verify, unless `lossless`).

        Returns:
          the new tokens; a list a sequence for a batch.

        Raises:
          LifecycleError: the run is complete, cancelled or paused, or something else drove its runtime.
          RollbackError: the draft is longer than a ring can undo.
          NonFiniteError: the logits hold NaN or an infinity, so that no choice can be right.
          UnsupportedError: a constraint allows no token.
        """
        emitted = self._emit(num_tokens, speculate)
        if self.warm is not None:
            self.warm.keep(self.runtime, self._run)
        return self._shaped(emitted)

    def stream(self, num_tokens: int | None = None, *, speculate: AnyDraft | None = None) -> Iterator[Piece]:
        """Yields what is emitted, token by token, as soon as its text is certain.

        A piece's text may be empty, while a character is incomplete or a stop string may
        be beginning; joined, the texts of a finished sequence are `text`.

        Args:
          num_tokens: for each sequence; None until all have ended.
          speculate: as in `run`.

        It ends early, without an error, where a pause or a cancel is asked for.

        Raises:
          LifecycleError: as `run`; or something else than this stream has moved the run meanwhile.
        """
        self._check_driving()
        return pieces(self, num_tokens, speculate)

    def force(self, token: int, row: int = 0) -> None:
        """Makes `token` the next one of sequence `row`, whatever the logits say.

        It takes one draw where tokens are drawn, so that all later draws stay as they were.

        Raises:
          GeometryError: the token is outside the vocabulary, or there is no such sequence.
          UnsupportedError: the constraint forbids it.
          LifecycleError: a token is forced already, or the sequence has ended.
        """
        self._check_driving()
        self._run.force(token, row, self.runtime.vocab_size)

    def clear_forced(self, row: int = 0) -> None:
        """Takes back what `force` has set and no token has used; does nothing if there is nothing."""
        self._check_driving()
        self._run.forced = self._run.forced.cleared(row)

    def override(self, *, seed: int | jax.Array | None = None, **settings: Any) -> None:
        """Changes settings of the sampler from here on; draws nothing and runs nothing.

        The stream of draws goes on, also over a greedy stretch; a seed changes it alone.

        Args:
          seed: of the draws from here on; None keeps the stream.
          **settings: fields of `Sampler`.

        Raises:
          UnsupportedError: a setting that means nothing, or sampling in a run that has no seed.
        """
        self._check_driving()
        run = self._run
        changed = overridden(
            run.sampler,
            run.sampling,
            prompts=run.prompts,
            outputs=run.outputs,
            vocab_size=self.runtime.vocab_size,
            seed=seed,
            **settings,
        )
        run.sampler, run.sampling = changed

    def patch(self, path: str, fn: Callable[[jax.Array], Any]) -> None:
        """Applies `fn` to a plane of the installed state, or to one layer's part of it; see `statecore.patch`.

        The state is marked, in all that comes of it: it enters no prefix cache.

        Raises:
          GeometryError: nothing has this name, or `fn` returned another shape or dtype.
          UnsupportedError: the plane is the position.
        """
        self._check_driving()
        runtime = self.runtime
        runtime.replace_state(patch(runtime.state, path, fn, planes=runtime.geometry))
        self._version = runtime.version

    def pause(self) -> None:
        """Pauses, between two tokens if it is running; everything that emits is refused until `resume`."""
        if self.status is not Status.RUNNING:
            self._run.lifecycle = self._run.lifecycle.pause()
        self.control.pause()

    def resume(self) -> None:
        """Lets a paused run go on."""
        self.control.acknowledge()

    def cancel(self) -> None:
        """Ends this run for good, between two tokens if it is running; branches live on, snapshots as forks."""
        if self.status is Status.RUNNING:
            self.control.cancel()
        else:
            self._run.lifecycle = self._run.lifecycle.cancel()

    def rollback_to_boundary(self, min_keep: int) -> Decision:
        """Goes back to the last boundary that drops at least `min_keep` tokens, and draws differently from there.

        Returns:
          what was decided; if it was declined, nothing has changed.

        Raises:
          UnsupportedError: boundaries were not given, or there are several sequences.
          LifecycleError: the run was cancelled or has failed.
        """
        self._check_driving()
        self._settle_life()
        self._run.lifecycle.checkpoint()
        return self._roll_back(min_keep)

    def _roll_back(self, min_keep: int) -> Decision:
        run, runtime, saves = self._run, self.runtime, self._run.saves
        if saves is None:
            raise UnsupportedError("This generation does not know its boundaries: give it `boundaries=`.")
        decision = saves.plan(
            runtime, run.rows[0], min_keep, num_rollbacks=run.num_rollbacks, is_streamed=run.is_streamed
        )
        if decision.decline is None:
            state, after = saves.state_at(runtime, decision), run.rolled_back(decision, runtime.vocab_size)
            runtime.replace_state(state, is_patched=runtime.is_patched, lengths=[decision.target - 1])
            self._run, self._version = after, runtime.version
        return decision

    def _emit(self, num_tokens: int, draft: AnyDraft | None) -> list[list[int]]:
        self._check_driving()
        return emit(self, num_tokens, draft)

    def _shaped(self, rows: list):
        return rows[0] if len(rows) == 1 else rows

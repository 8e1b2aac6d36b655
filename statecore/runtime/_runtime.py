"""`Runtime`: a loaded model with one installed state, an identity and a fence."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import FencedError, GeometryError, IdentityError, LifecycleError, LoadError
from statecore._pytree import is_deleted
from statecore._typing import IntLike, PyTree
from statecore.backend import Model, Window, check_mode, checks, launch
from statecore.native import Estimate, capture, estimate, estimate_growth
from statecore.runtime._slot import Slot
from statecore.state import Geometry, validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """Whether the runtime can do its work now, and if not, why."""

    is_supported: bool
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Installed:
    """What a runtime holds; replaced whole, so that an interrupt leaves the old or the new.

    version: counts changes, so that a driver can notice others.
    """

    state: PyTree
    lengths: np.ndarray
    version: int = 0
    window: Window | None = None
    num_valid: np.ndarray | None = None


class Runtime:
    """Owns one installed state and always donates it. Not thread-safe.

    A host mirror of each sequence's length lets every check run without waiting for the
    device. If a donating call fails after it took the state, the state is lost: the
    runtime is fenced and refuses all further work, naming the first cause.

    Args:
      model: from `statecore.load`.
      batch: sequences `B`.
      capacity: tokens each may hold.

    Raises:
      LoadError: `model` is no loaded model.
      GeometryError: the planes of the model's backend do not describe its state.
    """

    def __init__(self, model: Model, *, batch: int = 1, capacity: int):
        if not isinstance(model, Model):
            raise LoadError(
                f"A runtime needs a loaded model, but was given {type(model).__name__}. Load it: "
                "`sc.load((backend, params))`."
            )
        self.model = model
        self.identity = model.identity
        self.geometry: Geometry = model.geometry(batch=batch, capacity=capacity)
        self.driver: object = None  # the generation that drives this runtime
        self._fence: BaseException | None = None
        self._installed = _Installed(state=self._empty(), lengths=np.zeros(batch, np.int64))
        layout, leaves = self.geometry.layout, jax.tree.leaves(self.state)
        self.vocab_size: int = model.backend.vocab_size(model.params, self.state)
        self.token_capacity: int | None = layout.capacity(leaves)
        self._undo_limit = layout.undo_limit(leaves)
        self._checked_positions: set[str] = set()

    def __repr__(self) -> str:
        fence = ", fenced" if self._fence else ""
        return f"Runtime({self.model.name}, lengths {self.lengths.tolist()} of {self.geometry.capacity}{fence})"

    # What is installed.

    @property
    def lengths(self) -> np.ndarray:
        """The length of each sequence, `[B]`, from the host mirror."""
        return self._installed.lengths.copy()

    @property
    def state(self) -> PyTree:
        """The installed state, borrowed: the next transition consumes it. Keep a `capture`."""
        return self._installed.state

    @property
    def version(self) -> int:
        """How often the installed state has changed."""
        return self._installed.version

    @property
    def max_window(self) -> int | None:
        """The widest window that the rings can undo; None if there are no rings."""
        return None if self._undo_limit is None else self._undo_limit[0]

    def support(self) -> Support:
        """Returns whether this runtime can capture and exchange at all: not once it is fenced.

        Has no effect. An open window is no lack of support; it only has to be committed first.
        """
        if self._fence is not None:
            return Support(is_supported=False, reason=f"fenced: {self._cause()}")
        return Support(is_supported=True)

    def reset(self) -> None:
        """Installs a fresh empty state in place of the installed one."""
        self._check_ready()
        self._install(self._empty(), np.zeros_like(self.lengths))

    # Slots.

    def estimate(self, slot: Slot | None = None) -> Estimate | None:
        """Returns what a copy of the installed state, or of `slot`, costs; None if unknown."""
        self._check_ready()
        if slot is not None:
            self.validate(slot)
        return estimate(self.geometry)

    def estimate_growth(self, slot: Slot | None, num_tokens: int) -> int | None:
        """Returns the bytes that `num_tokens` more tokens will hold; None if unknown or too many."""
        self._check_ready()
        if slot is not None:
            self.validate(slot)
        lengths = self.lengths if slot is None else slot.lengths
        return estimate_growth(self.geometry, lengths.tolist(), num_tokens)

    def capture(self, *, into: Slot | None = None) -> Slot:
        """Returns an independent copy of the installed state, complete in memory. Donates `into`.

        Raises:
          FencedError, LifecycleError: the runtime has lost its state, or a window is open.
          StateConsumedError, GeometryError: `into` cannot take the copy.
        """
        self._check_ready()
        return self._copied(self.state, self.lengths, into)

    def copy(self, slot: Slot, *, into: Slot | None = None) -> Slot:
        """Returns another independent copy of `slot`, which stays as it is. Donates `into`."""
        self._check_ready()
        self.validate(slot)
        return self._copied(slot.state, slot.lengths, into)

    def validate(self, slot: Slot) -> None:
        """Checks that `slot` may be installed here. Changes nothing.

        Raises:
          FencedError, LifecycleError: the runtime cannot take a state now.
          StateConsumedError: the slot was exchanged, or its buffers are gone.
          IdentityError: it comes from another load or other weights.
          GeometryError: it is no slot, or names every plane that does not fit.
        """
        self._check_ready()
        if not isinstance(slot, Slot):
            raise GeometryError(f"A slot is needed, such as `capture` returns, but this is a {type(slot).__name__}.")
        slot.check_usable()
        if slot.identity != self.identity:
            what = "other weights" if slot.identity.load is self.identity.load else "another load of a model"
            raise IdentityError(
                f"This slot was captured from {what}, so its state means nothing to this {self.model.name}, even if "
                "every shape fits. Capture it from a runtime of this load."
            )
        validate(self.geometry, slot.state)

    def exchange(self, slot: Slot) -> Slot:
        """Installs `slot` and returns the slot that holds what was installed. Moves no tensor.

        `slot` is consumed.

        Raises:
          FencedError, LifecycleError, StateConsumedError, IdentityError, GeometryError: as
            `validate`; nothing has changed.
        """
        self.validate(slot)
        held = Slot(state=self.state, identity=self.identity, lengths=self.lengths)
        self._install(slot.state, slot.lengths)
        slot.consume("exchanged: its state is installed, and the slot that `exchange` returned holds what was before")
        return held

    # Transitions, each of which consumes the installed state.

    def step(self, tokens: IntLike) -> jax.Array:
        """Takes one token of each sequence, `[B]`; returns logits `[B, V]`."""
        self._check_ready()
        array = checks.check_tokens(tokens, len(self.lengths), 1)
        array = checks.check_vocab(array, None, self.vocab_size)
        self._check_room(np.ones_like(self.lengths))
        with self._donating():
            state, logits = launch.step(self.model.backend, self.model.params, self.state, array, donate=True)
            self._install(state, self.lengths + 1)
        self._check_position("step")
        return logits

    def extend(self, tokens: IntLike, *, num_valid: IntLike | None = None, logits: str = "last") -> jax.Array | None:
        """Takes a chunk, `[B, T]`; returns logits as `statecore.extend` does."""
        self._check_ready()
        checks.check_logits(logits)
        array, counts = self._check_rows(tokens, num_valid)
        with self._donating():
            state, wanted = launch.extend(
                self.model.backend, self.model.params, self.state, array, counts, logits=logits, donate=True
            )
            self._install(state, self.lengths + counts)
        self._check_position("extend")
        return wanted

    def verify(self, tokens: IntLike, *, num_valid: IntLike | None = None, mode: str | None = None) -> jax.Array:
        """Reads a window, `[B, K]`, and opens it; returns logits `[B, K, V]`.

        Until `commit`, everything else is refused.
        """
        self._check_ready()
        backend, mode = self.model.backend, check_mode(self.model.backend, mode)
        array, counts = self._check_rows(tokens, num_valid)
        checks.check_window(array.shape)
        checks.check_undo(self._undo_limit, counts)
        with self._donating():
            state, logits, trace = launch.verify(
                backend, self.model.params, self.state, array, counts, mode=mode, donate=True
            )
            window = Window(
                state=state,
                logits=logits,
                num_valid=jnp.asarray(counts),
                trace=trace,
                mode=mode,
                origin=backend.origin,
            )
            self._install(state, self.lengths, window=window, num_valid=counts)
        return logits

    def commit(self, num_accepted: IntLike) -> None:
        """Makes the first `num_accepted` rows of the open window the state, an int or `[B]`."""
        self._check_healthy()
        window, num_valid = self._installed.window, self._installed.num_valid
        if window is None or num_valid is None:
            raise LifecycleError("No window is open: `verify` one before you commit it. A window serves once.")
        counts = checks.check_accepted(num_accepted, num_valid)
        checks.check_opaque(self.geometry.layout, counts, num_valid)
        rows = counts.astype(np.int32)
        with self._donating():
            state = launch.commit(self.model.backend, window.state, window.trace, rows, mode=window.mode, donate=True)
            self._install(state, self.lengths + counts)
        self._check_position("commit")

    def abandon(self) -> None:
        """Closes an open window with none of its rows kept; does nothing if none is open."""
        if self._installed.window is not None:
            self.commit(0)

    def check_prompt(self, rows: list[list[int]]) -> None:
        """Raises GeometryError if a token of `rows` is outside the vocabulary."""
        for row in rows:
            checks.check_vocab(np.array(row), None, self.vocab_size)

    # Inside.

    def _empty(self) -> PyTree:
        return self.model.backend.init(self.model.params, batch=self.geometry.batch, capacity=self.geometry.capacity)

    def _install(
        self,
        state: PyTree,
        lengths: np.ndarray,
        *,
        window: Window | None = None,
        num_valid: np.ndarray | None = None,
    ) -> None:
        self._installed = _Installed(
            state=state, lengths=lengths, version=self.version + 1, window=window, num_valid=num_valid
        )

    def _copied(self, state: PyTree, lengths: np.ndarray, into: Slot | None) -> Slot:
        if into is not None:
            self.validate(into)
        target = None if into is None else into.state
        copied = jax.block_until_ready(capture(state, into=target))
        if into is not None:
            into.consume("given as `into=`: the slot that was returned has its buffers")
        return Slot(state=copied, identity=self.identity, lengths=lengths.copy())

    def _check_rows(self, tokens: IntLike, num_valid: IntLike | None) -> tuple[np.ndarray, np.ndarray]:
        batch = len(self.lengths)
        array = checks.check_tokens(tokens, batch, 2)
        counts = checks.check_rows_counts(num_valid, batch, array.shape[1], "num_valid")
        valid = np.arange(array.shape[1]) < counts[:, None]
        self._check_room(counts)
        return checks.check_vocab(array, valid, self.vocab_size), counts.astype(np.int32)

    def _check_room(self, counts: np.ndarray) -> None:
        checks.check_room(self.geometry.layout, self.lengths, counts, self.token_capacity)

    def _check_position(self, name: str) -> None:
        """Holds the position plane against the mirror, once for each kind of transition."""
        if name in self._checked_positions:
            return
        found = np.array(self.geometry.layout.lengths(self.state))
        if (found != self.lengths).any():
            self._fence = GeometryError(
                f"`{name}` of {self.model.name} left the position at {found.tolist()}, but {self.lengths.tolist()} "
                "tokens are in the state. A position counts the tokens, one each"
            )
            self._check_healthy()
        self._checked_positions.add(name)

    def _cause(self) -> str:
        return (str(self._fence) or repr(self._fence)).splitlines()[0]

    def _check_healthy(self) -> None:
        if self._fence is not None:
            raise FencedError(
                f"This runtime lost its state in a failed call and is fenced. First cause: {self._cause()}. "
                "Make a new runtime; slots captured before can be installed there."
            ) from self._fence

    def _check_ready(self) -> None:
        self._check_healthy()
        if self._installed.window is not None:
            raise LifecycleError("A window is open: `commit` it first, with 0 rows to keep none of it.")

    @contextmanager
    def _donating(self) -> Iterator[None]:
        """Fences the runtime if what is inside takes the state and does not install another."""
        before = self._installed
        try:
            yield
        except BaseException as cause:
            if self._installed is before and any(is_deleted(leaf) for leaf in jax.tree.leaves(before.state)):
                self._fence = cause
            raise

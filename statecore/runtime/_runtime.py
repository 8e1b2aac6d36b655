"""`Runtime`: a loaded model with one installed state, an identity and a fence."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import FencedError, IdentityError, LifecycleError
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
      GeometryError: the planes of the model's backend do not describe its state.
    """

    def __init__(self, model: Model, *, batch: int = 1, capacity: int):
        self.model = model
        self.identity = model.identity
        self.geometry: Geometry = model.geometry(batch=batch, capacity=capacity)
        self.version = 0  # counts changes of the installed state, so that a driver can notice others
        self._fence: BaseException | None = None
        self._window: Window | None = None
        self._state: PyTree = self._empty()
        self._lengths = np.zeros(batch, np.int64)
        layout, leaves = self.geometry.layout, jax.tree.leaves(self._state)
        self.vocab_size: int = model.backend.vocab_size(model.params, self._state)
        self.token_capacity: int | None = layout.capacity(leaves)
        self._undo_limit = layout.undo_limit(leaves)

    def __repr__(self) -> str:
        fence = ", fenced" if self._fence else ""
        return f"Runtime({self.model.name}, lengths {self._lengths.tolist()} of {self.geometry.capacity}{fence})"

    # What is installed.

    @property
    def lengths(self) -> np.ndarray:
        """The length of each sequence, `[B]`, from the host mirror."""
        return self._lengths.copy()

    @property
    def state(self) -> PyTree:
        """The installed state, borrowed: the next transition consumes it. Keep a `capture`."""
        return self._state

    @property
    def max_window(self) -> int | None:
        """The widest window that the rings can undo; None if there are no rings."""
        return None if self._undo_limit is None else self._undo_limit[0]

    def support(self) -> Support:
        """Returns whether states can be captured and exchanged now. Has no effect."""
        if self._fence is not None:
            return Support(is_supported=False, reason=f"fenced: {self._fence}")
        return Support(is_supported=True)

    def reset(self) -> None:
        """Installs a fresh empty state in place of the installed one."""
        self._check_ready()
        self._install(self._empty(), np.zeros_like(self._lengths))

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
        lengths = self._lengths if slot is None else slot.lengths
        return estimate_growth(self.geometry, lengths.tolist(), num_tokens)

    def capture(self, *, into: Slot | None = None) -> Slot:
        """Returns an independent copy of the installed state, complete in memory. Donates `into`.

        Raises:
          FencedError, LifecycleError: the runtime has lost its state, or a window is open.
          StateConsumedError, GeometryError: `into` cannot take the copy.
        """
        self._check_ready()
        return self._copied(self._state, self._lengths, into)

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
          GeometryError: names every plane that does not fit.
        """
        self._check_ready()
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
        slot.consume()
        held = Slot(state=self._state, identity=self.identity, lengths=self._lengths)
        self._install(slot.state, slot.lengths)
        return held

    # Transitions, each of which consumes the installed state.

    def step(self, tokens: IntLike) -> jax.Array:
        """Takes one token of each sequence, `[B]`; returns logits `[B, V]`."""
        self._check_ready()
        array = checks.check_tokens(tokens, len(self._lengths), 1)
        array = checks.check_vocab(array, None, self.vocab_size)
        self._check_room(np.ones_like(self._lengths))
        with self._donating():
            self._state, logits = launch.step(
                self.model.backend, self.model.params, self._state, jnp.asarray(array), donate=True
            )
        self._advance(1)
        return logits

    def extend(self, tokens: IntLike, *, num_valid: IntLike | None = None, logits: str = "last") -> jax.Array | None:
        """Takes a chunk, `[B, T]`; returns logits as `statecore.extend` does."""
        self._check_ready()
        array, counts = self._check_rows(tokens, num_valid)
        with self._donating():
            self._state, wanted = launch.extend(
                self.model.backend, self.model.params, self._state, array, counts, logits=logits, donate=True
            )
        self._advance(counts)
        return wanted

    def verify(self, tokens: IntLike, *, num_valid: IntLike | None = None, mode: str | None = None) -> jax.Array:
        """Reads a window, `[B, K]`, and opens it; returns logits `[B, K, V]`.

        Until `commit`, everything else is refused.
        """
        self._check_ready()
        mode = check_mode(self.model.backend, mode)
        array, counts = self._check_rows(tokens, num_valid)
        checks.check_window(array.shape)
        checks.check_undo(self._undo_limit, counts)
        backend = self.model.backend
        with self._donating():
            self._state, logits, trace = launch.verify(
                backend, self.model.params, self._state, array, counts, mode=mode, donate=True
            )
        self._window = Window(
            state=self._state,
            logits=logits,
            num_valid=jnp.asarray(counts),
            trace=trace,
            mode=mode,
            origin=backend.origin,
        )
        self._valid = counts
        return logits

    def commit(self, num_accepted: IntLike) -> None:
        """Makes the first `num_accepted` rows of the open window the state, an int or `[B]`."""
        self._check_healthy()
        window = self._window
        if window is None:
            raise LifecycleError("No window is open: `verify` one before you commit it. A window serves once.")
        counts = checks.check_accepted(num_accepted, self._valid)
        checks.check_opaque(self.geometry.layout, counts, self._valid)
        with self._donating():
            self._state = launch.commit(
                self.model.backend, window.state, window.trace, counts.astype(np.int32), mode=window.mode, donate=True
            )
        self._window = None
        self._advance(counts)

    # Inside.

    def _empty(self) -> PyTree:
        return self.model.backend.init(self.model.params, batch=self.geometry.batch, capacity=self.geometry.capacity)

    def _install(self, state: PyTree, lengths: np.ndarray) -> None:
        self._state, self._lengths = state, lengths
        self.version += 1

    def _advance(self, counts: IntLike) -> None:
        self._lengths = self._lengths + counts
        self.version += 1

    def _copied(self, state: PyTree, lengths: np.ndarray, into: Slot | None) -> Slot:
        if into is not None:
            self.validate(into)
        target = None if into is None else into.state
        copied = jax.block_until_ready(capture(state, into=target))
        if into is not None:
            into.consume()
        return Slot(state=copied, identity=self.identity, lengths=lengths.copy())

    def _check_rows(self, tokens: IntLike, num_valid: IntLike | None) -> tuple[np.ndarray, np.ndarray]:
        batch = len(self._lengths)
        array = checks.check_tokens(tokens, batch, 2)
        counts = checks.check_rows_counts(num_valid, batch, array.shape[1], "num_valid")
        valid = np.arange(array.shape[1]) < counts[:, None]
        self._check_room(counts)
        return checks.check_vocab(array, valid, self.vocab_size), counts.astype(np.int32)

    def check_prompt(self, rows: list[list[int]]) -> None:
        """Raises GeometryError if a token of `rows` is outside the vocabulary."""
        for row in rows:
            checks.check_vocab(np.array(row), None, self.vocab_size)

    def _check_room(self, counts: np.ndarray) -> None:
        checks.check_room(self.geometry.layout, self._lengths, counts, self.token_capacity)

    def _check_healthy(self) -> None:
        if self._fence is not None:
            raise FencedError(
                f"This runtime lost its state in a failed call and is fenced. First cause: {self._fence}. "
                "Make a new runtime; slots captured before can be installed there."
            ) from self._fence

    def _check_ready(self) -> None:
        self._check_healthy()
        if self._window is not None:
            raise LifecycleError("A window is open: `commit` it first, with 0 rows to keep none of it.")

    @contextmanager
    def _donating(self) -> Iterator[None]:
        """Fences the runtime if the call inside fails after it has taken the state."""
        try:
            yield
        except BaseException as cause:
            if any(is_deleted(leaf) for leaf in jax.tree.leaves(self._state)):
                self._fence = cause
            raise

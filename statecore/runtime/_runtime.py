"""`Runtime`: a loaded model with one installed state, an identity and a fence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, LifecycleError, UnsupportedError
from statecore._pytree import copy_leaves, is_deleted
from statecore._typing import IntLike, PyTree
from statecore.backend import Window, check_mode, checks, launch
from statecore.runtime._installed import marked, read_only
from statecore.runtime._owner import locked
from statecore.runtime._slots import SlotOwner
from statecore.runtime.faults import reach

# Planes that one transition may write and another one not: they are shared or not together.
_GROUPS = (("append", "sliding"), ("position", "shift", "recurrent", "opaque"))


class Runtime(SlotOwner):
    """Owns one installed state and always donates it. Its operations are serialised between threads.

    A host mirror of each sequence's length lets every check run without waiting for the
    device. If a donating call fails after it took the state, or its results turn out bad
    later, the state is lost: the runtime is fenced and refuses all further work, naming
    the first cause.

    Args:
      model: from `statecore.load`.
      batch: sequences `B`.
      capacity: tokens each may hold.

    Raises:
      LoadError: `model` is no loaded model.
      GeometryError: the planes of the model's backend do not describe its state.
    """

    # Transitions, each of which consumes the installed state.

    @locked
    def step(self, tokens: IntLike, *, live: IntLike | None = None) -> jax.Array:
        """Takes one token of each sequence, `[B]`; returns logits `[B, V]`.

        With `live`, `[B]` booleans on the host, only those sequences advance: of the others
        nothing that can be read changes, their tokens do not matter, and their logits are NaN.
        """
        self._check_ready()
        installed, backend = self._installed, self.model.backend
        array = checks.check_tokens(tokens, len(installed.lengths), 1)
        if live is None:
            array = checks.check_vocab(array, None, self.vocab_size)
            counts = np.ones_like(installed.lengths)
            self._check_room(counts)
            run, name, rows = launch.step, "step", (array,)
        else:
            mask = _live_rows(live, len(installed.lengths))
            array = checks.check_vocab(array, mask, self.vocab_size)
            counts = mask.astype(np.int64)
            self._check_room(counts)
            run, name, rows = launch.step_live, "step of live rows", (array, mask)
        [logits] = self._advance(
            lambda shared: run(backend, self.model.params, installed.state, *rows, donate=True, **shared),
            installed.lengths + counts,
        )
        self._check_position(name)
        return logits

    @locked
    def decode(
        self, tokens: IntLike, picking: PyTree, pick: launch.Pick, *, num_tokens: int, counts: np.ndarray | None = None
    ) -> tuple[PyTree, PyTree]:
        """Takes `[B]` tokens and picks those after them, `num_tokens` times in one call.

        What is picked never comes to the host on the way, so a token costs no dispatch.

        Args:
          tokens: `[B]`, the pending ones; those of sequences that take no step do not matter.
          picking: what `pick` carries; `picking.live` `[B]` says who goes on.
          pick: see `launch.decode`.
          num_tokens: steps.
          counts: `[B]`, the most steps of each sequence, where they may end on the way: `out`
            must then have `live`, `[num_tokens, B]`. None if all go on throughout.

        Returns:
          `picking` after the last step, and `out` of each step, stacked, on the host.
        """
        self._check_ready()
        installed, backend = self._installed, self.model.backend
        most = np.full(len(installed.lengths), num_tokens) if counts is None else np.asarray(counts, np.int64)
        array = checks.check_tokens(tokens, len(installed.lengths), 1)
        array = checks.check_vocab(array, most > 0, self.vocab_size)
        self._check_room(most)
        is_masked = counts is not None

        def run(shared: dict[str, Any]) -> tuple:
            state, picking_after, outs = launch.decode(
                backend, self.model.params, installed.state, array, picking, pick,
                num_tokens=num_tokens, is_masked=is_masked, donate=True, **shared,
            )  # fmt: skip
            return state, picking_after, jax.tree.map(np.array, outs)

        def lengths(picking_after: PyTree, outs: PyTree) -> np.ndarray:
            return installed.lengths + (outs.live.sum(axis=0) if is_masked else most)

        picking, outs = self._advance(run, lengths)
        self._check_position("decode")
        return picking, outs

    @locked
    def speculate(self, carry: PyTree, loop: launch.Loop, *, most: np.ndarray, mode: str | None = None) -> PyTree:
        """Guesses, verifies and commits window after window in one call; see `launch.speculate`.

        Args:
          carry: what `loop` carries; `fed`, `[B]`, counts the tokens that have entered the state.
          loop: what is done between transitions. A window of it is no wider than `max_window`.
          most: `[B]`, tokens that may enter the state of each sequence.
          mode: of the verifies.

        Returns:
          `carry` after the last round.

        Raises:
          UnsupportedError: a plane cannot be taken back.
        """
        self._check_ready()
        installed, backend, mode = self._installed, self.model.backend, check_mode(self.model.backend, mode)
        if opaque := self.geometry.layout.indices("opaque"):
            path = self.geometry.layout.paths[opaque[0]]
            raise UnsupportedError(f"Windows cannot be committed in part: nothing undoes the opaque plane `{path}`.")
        self._check_room(np.asarray(most, np.int64))

        def run(shared: dict[str, Any]) -> tuple:
            state, after = launch.speculate(
                backend, self.model.params, installed.state, carry, loop, mode=mode, donate=True, **shared
            )
            return state, after, np.array(after.fed)

        after, _ = self._advance(run, lambda _, fed: installed.lengths + fed)
        self._check_position("speculate")
        return after

    @locked
    def extend(self, tokens: IntLike, *, num_valid: IntLike | None = None, logits: str = "last") -> jax.Array | None:
        """Takes a chunk, `[B, T]`; returns logits as `statecore.extend` does."""
        self._check_ready()
        checks.check_logits(logits)
        array, counts = self._check_rows(tokens, num_valid)
        backend, params, installed = self.model.backend, self.model.params, self._installed
        [wanted] = self._advance(
            lambda shared: launch.extend(
                backend, params, installed.state, array, counts, logits=logits, donate=True, **shared
            ),
            installed.lengths + counts,
        )
        self._check_position("extend")
        return wanted

    @locked
    def verify(self, tokens: IntLike, *, num_valid: IntLike | None = None, mode: str | None = None) -> jax.Array:
        """Reads a window, `[B, K]`, and opens it; returns logits `[B, K, V]`.

        Until `commit`, everything else is refused.
        """
        self._check_ready()
        backend, mode = self.model.backend, check_mode(self.model.backend, mode)
        array, counts = self._check_rows(tokens, num_valid)
        checks.check_window(array.shape)
        checks.check_undo(self._undo_limit, counts)
        installed = self._installed

        def opened(state: PyTree, logits: jax.Array, trace: PyTree) -> Window:
            num_rows = jnp.asarray(counts)
            return Window(state=state, logits=logits, num_valid=num_rows, trace=trace, mode=mode, origin=backend.origin)

        logits, _ = self._advance(
            lambda shared: launch.verify(
                backend, self.model.params, installed.state, array, counts, mode=mode, donate=True, **shared
            ),
            installed.lengths,
            opened=opened,
            num_valid=counts,
        )
        return logits

    @locked
    def commit(self, num_accepted: IntLike, *, version: int | None = None) -> None:
        """Makes the first `num_accepted` rows of the open window the state, an int or `[B]`.

        Args:
          num_accepted: rows kept, the anchor included.
          version: the runtime's `version` when the window was opened, so that a commit that
            comes late is not taken for that of a newer window; not checked if None.

        Raises:
          LifecycleError: no window is open, or it is another one than `version` says.
          RollbackError: the count is out of range, or an opaque plane would have to go back.
        """
        self._check_healthy()
        installed = self._installed
        window, num_valid = installed.window, installed.num_valid
        if window is None or num_valid is None:
            raise LifecycleError("No window is open: `verify` one before you commit it. A window serves once.")
        if version is not None and version != installed.version:
            raise LifecycleError(
                f"This commit is for the window of version {version}, but the open one is of {installed.version}. "
                "Was it committed before?"
            )
        counts = checks.check_accepted(num_accepted, num_valid)
        checks.check_opaque(self.geometry.layout, counts, num_valid)
        rows, backend = counts.astype(np.int32), self.model.backend
        self._advance(
            lambda shared: (
                launch.commit(backend, window.state, window.trace, rows, mode=window.mode, donate=True, **shared),
            ),
            installed.lengths + counts,
        )
        self._check_position("commit")

    @locked
    def abandon(self) -> None:
        """Closes an open window with none of its rows kept; does nothing if none is open.

        Raises:
          RollbackError: an opaque plane would have to go back; the window stays open.
        """
        if self._installed.window is not None:
            self.commit(0)

    def check_prompt(self, rows: list[list[int]]) -> None:
        """Raises GeometryError if a token of `rows` is outside the vocabulary."""
        for row in rows:
            checks.check_vocab(np.array(row), None, self.vocab_size)

    # Inside.

    def _advance(
        self,
        run: Callable[[dict[str, Any]], tuple],
        lengths: np.ndarray | Callable[..., np.ndarray],
        *,
        opened: Callable[..., Window] | None = None,
        num_valid: np.ndarray | None = None,
    ) -> list:
        """Runs a transition that takes the state, installs the new one, and returns the other results.

        `run` is given what slots refer to too, as an argument of `launch`: that is written,
        but not donated, and stays with them alone.
        """
        was_shared = self._installed.is_shared
        with self._donating():
            reach("dispatch")
            shared = self._shared_groups() if was_shared else ()
            state, *results = run({"shared": shared} if shared else {})
            if was_shared and opened is None:
                state = self._unshared(state)
            state = marked(state, self._installed.is_patched)
            window = None if opened is None else opened(state, *results)
            lengths = lengths(*results) if callable(lengths) else lengths
            # A verify hands through what it does not write: that is still shared.
            is_shared = was_shared and opened is not None
            lengths = read_only(lengths)
            self._install(self._following(state, lengths, window=window, num_valid=num_valid, is_shared=is_shared))
        if was_shared:
            self._book.drop_settled()
        return results

    def _shared_groups(self) -> tuple[int, ...]:
        """Returns the planes that must not be donated: all of a group if one of it is shared."""
        layout = self.geometry.layout
        found = set(self._book.shared(self, self.held_leaves()))
        groups = [layout.indices(*kinds) for kinds in _GROUPS]
        return tuple(sorted(i for group in groups if not found.isdisjoint(group) for i in group))

    def _unshared(self, state: PyTree) -> PyTree:
        """Returns `state` with copies of the planes that no transition writes and a slot has too."""
        leaves = jax.tree.leaves(state)
        shared = self._book.shared(self, leaves)
        for i, copied in zip(shared, copy_leaves([leaves[i] for i in shared]), strict=True):
            leaves[i] = copied
        return self.geometry.layout.unflatten(leaves) if shared else state

    def _check_rows(self, tokens: IntLike, num_valid: IntLike | None) -> tuple[np.ndarray, np.ndarray]:
        batch = len(self._installed.lengths)
        array = checks.check_tokens(tokens, batch, 2)
        counts = checks.check_rows_counts(num_valid, batch, array.shape[1], "num_valid")
        valid = np.arange(array.shape[1]) < counts[:, None]
        self._check_room(counts)
        return checks.check_vocab(array, valid, self.vocab_size), counts.astype(np.int32)

    def _check_room(self, counts: np.ndarray) -> None:
        checks.check_room(self.geometry.layout, self._installed.lengths, counts, self.token_capacity)

    def _check_position(self, name: str) -> None:
        """Holds the position plane against the mirror, once for each kind of transition."""
        if name in self._checked_positions:
            return
        self._settle()
        found = np.array(self.geometry.layout.lengths(self.state))
        if (found != self.lengths).any():
            self._fence = GeometryError(
                f"`{name}` of {self.model.name} left the position at {found.tolist()}, but {self.lengths.tolist()} "
                "tokens are in the state. A position counts the tokens, one each"
            )
            self._check_healthy()
        self._checked_positions.add(name)

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


def _live_rows(live: IntLike, batch: int) -> np.ndarray:
    """Returns `live` on the host, `[B]` bool; raises GeometryError for anything else."""
    mask = np.array(live)
    if mask.dtype != np.bool_ or mask.shape != (batch,):
        raise GeometryError(
            f"`live` is {mask.dtype}{list(mask.shape)}, but must say for each of the {batch} sequences whether it "
            f"advances: bool[{batch}]."
        )
    return mask

"""The state of a draft model: the tokens that were emitted, and while a window is open the guesses."""

import dataclasses

import jax
import numpy as np

from statecore._typing import PyTree
from statecore.backend import Model, launch
from statecore.generation import CHUNK_LENGTHS
from statecore.native import capture


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fed:
    """What a draft fed its model in one round.

    trace: keeps any prefix of it.
    tokens: of each sequence, in order.
    num_given: `[B]`, how many of them had been emitted before.
    """

    trace: PyTree
    tokens: list[list[int]]
    num_given: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Following:
    """A draft model's state. Immutable, but its arrays are donated as it is advanced.

    state: of the draft model.
    held: the tokens of each sequence that are in it, always emitted ones.
    capacity: tokens that each sequence may hold.
    fed: what was fed and is not yet decided on.
    """

    state: PyTree
    held: list[list[int]]
    capacity: int
    fed: Fed | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def copy(self) -> "Following":
        """Returns an independent copy."""
        return dataclasses.replace(self, state=capture(self.state), held=[list(row) for row in self.held])


def followed(model: Model, before: Following | None, histories: list[list[int]], capacity: int) -> Following:
    """Returns a state in which at most two tokens of each history are missing, the last among them.

    What a state holds beyond the common prefix with its history is taken back where the
    position alone undoes it; else the state is made anew. Donates `before`.
    """
    now = before
    if now is not None and (now.capacity < capacity or len(now.held) != len(histories)):
        now = None
    if now is not None and not all(_is_prefix(held, row[:-1]) for held, row in zip(now.held, histories, strict=True)):
        now = _cut(model, now, histories)
    if now is None:
        state = model.backend.init(model.params, batch=len(histories), capacity=capacity)
        now = Following(state=state, held=[[] for _ in histories], capacity=capacity)
    # Two tokens can be fed with the guesses: the last one, and one that was guessed last and never fed.
    if all(len(row) - len(held) <= 2 for held, row in zip(now.held, histories, strict=True)):
        return now
    return _fed(model, now, [row[:-1] for row in histories])


def _is_prefix(held: list[int], row: list[int]) -> bool:
    return row[: len(held)] == held


def _cut(model: Model, now: Following, histories: list[list[int]]) -> Following | None:
    """Returns the state cut to what it has in common with the histories; None if more than rows would have to go."""
    layout = model.backend.layout
    if layout.indices("shift", "recurrent", "opaque", "sliding"):
        return None
    held = [held[: _num_common(held, row[:-1])] for held, row in zip(now.held, histories, strict=True)]
    lengths = jax.numpy.asarray([len(row) for row in held], jax.numpy.int32)
    return dataclasses.replace(now, state=layout.with_lengths(now.state, lengths), held=held)


def _num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _fed(model: Model, now: Following, rows: list[list[int]]) -> Following:
    """Returns the state after all of `rows`, chunk by chunk."""
    state, held = now.state, [len(row) for row in now.held]
    missing = [row[start:] for start, row in zip(held, rows, strict=True)]
    start, longest = 0, max(len(row) for row in missing)
    while start < longest:
        length = next((size for size in CHUNK_LENGTHS if size >= longest - start), CHUNK_LENGTHS[-1])
        chunk, counts = np.zeros((len(rows), length), np.int32), np.zeros(len(rows), np.int32)
        for number, row in enumerate(missing):
            part = row[start : start + length]
            chunk[number, : len(part)], counts[number] = part, len(part)
        state, _ = launch.extend(model.backend, model.params, state, chunk, counts, logits="none", donate=True)
        start += length
    return dataclasses.replace(now, state=state, held=[list(row) for row in rows])


def settled(model: Model, now: Following, num_rows: np.ndarray) -> Following:
    """Returns the state with the tokens that had been emitted and the first `num_rows` `[B]` of a round's window.

    Of a window that was accepted whole the last guess was never fed, so it is missing: the
    next round gives it, and positions stay contiguous.
    """
    fed = now.fed
    assert fed is not None
    lengths = np.array([len(row) for row in fed.tokens])
    before = np.maximum(fed.num_given - 1, 0)
    kept = np.where(lengths > 0, before + np.minimum(num_rows, lengths - before), 0).astype(np.int32)
    state = launch.commit(model.backend, now.state, fed.trace, kept, mode="exact", donate=True)
    held = [row + tokens[:count] for row, tokens, count in zip(now.held, fed.tokens, kept, strict=True)]
    return dataclasses.replace(now, state=state, held=held, fed=None)

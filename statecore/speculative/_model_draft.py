"""Drafts by another model, smaller than the one it guesses for."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, LoadError, RollbackError, UnsupportedError
from statecore.backend import Backend, Model, launch
from statecore.generation import Drawing, Proposal, kept_logits
from statecore.runtime import Runtime
from statecore.speculative._accept import DRAFT, accept_sampled, accept_typical, place_key
from statecore.speculative._following import Fed, Following, followed, settled

_RULES = {"sampled": accept_sampled, "typical": accept_typical, "same": None}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelDraft:
    """Guesses what a smaller model would write.

    The draft model has a state of its own in each run, which holds the emitted tokens and
    no other: guesses that were rejected are taken back from it, whatever its planes are.
    The state is the run's: a snapshot has it, a fork copies it, an exchange takes it along.

    In a sampled run guesses are drawn with the run's temperature and cuts, from a stream of
    their own, and accepted as `acceptance` says:

    - `sampled`: by speculative sampling; the output is distributed as the model's own draws;
    - `same`: if plain decoding would draw them; the output is plain decoding's, token for token, but
      fewer guesses are accepted. Guesses are drawn with the noise of plain decoding's draws, so that
      two models that agree draw the same;
    - `typical`: if they are likely enough; not lossless.

    A greedy run accepts what is likeliest, always.

    model: the draft model; of the same vocabulary, any backend whose planes can be undone.
    num_draft: tokens guessed at once.
    acceptance: `sampled`, `same` or `typical`.
    """

    model: Model
    num_draft: int = 4
    acceptance: str = "sampled"

    @property
    def rule(self) -> Any:
        """How drawn guesses are accepted; None if plain decoding must draw them too."""
        return _RULES[self.acceptance]

    @property
    def is_lossless(self) -> bool:
        """Whether the output is distributed as the model's own draws."""
        return self.acceptance != "typical"

    def check(self, runtime: Runtime) -> None:
        """Raises a StateError unless this draft can guess for the model of `runtime`; runs nothing.

        Raises:
          LoadError: `model` is no loaded model.
          UnsupportedError: there is no such acceptance, or nothing undoes a plane of the draft model.
          GeometryError: the vocabularies differ.
          RollbackError: the draft model's rings cannot undo so many guesses.
        """
        model = self.model
        if not isinstance(model, Model):
            raise LoadError(f"A draft needs a loaded model, but was given {type(model).__name__}. Load it: `sc.load`.")
        if self.acceptance not in _RULES:
            raise UnsupportedError(f"acceptance={self.acceptance!r} is not one of {', '.join(_RULES)}.")
        vocab_size, opaque, limit = self._facts
        if vocab_size != runtime.vocab_size:
            raise GeometryError(
                f"The draft model {model.name} has {vocab_size} tokens, but {runtime.model.name} has "
                f"{runtime.vocab_size}: a guess must mean the same to both. Do they share a tokenizer?"
            )
        if opaque:
            raise UnsupportedError(
                f"The draft model {model.name} cannot take guesses back: nothing undoes its plane `{opaque}`."
            )
        if limit is not None and self.num_draft + 1 > limit[0]:
            raise RollbackError(
                f"num_draft is {self.num_draft}, but the ring `{limit[1]}` of the draft model {model.name} can undo "
                f"{limit[0]} tokens, one of them the last that was emitted. Draft fewer tokens."
            )

    @functools.cached_property
    def _facts(self) -> tuple[int, str, tuple[int, str] | None]:
        return _facts(self.model)

    def propose_rows(self, state: Following | None, drawing: Drawing) -> tuple[Following, Proposal]:
        """Returns guesses for all sequences, and the state that waits for `settle`. Donates `state`."""
        model, histories, limits = self.model, drawing.histories, drawing.limits
        now = followed(model, state, histories, drawing.capacity)
        missing = [
            row[len(held) :] if limit else [] for row, held, limit in zip(histories, now.held, limits, strict=True)
        ]
        given, num_given = _given(missing)
        num_rows = np.where(limits > 0, num_given + limits - 1, 0).astype(np.int32)
        picking = drawing.cuts, drawing.key, drawing.emitted
        planes, tokens, probs, trace = launch.draft(
            model.backend, model.params, now.state, given, np.maximum(num_given, 1), num_rows, picking,
            _pick_same if self.acceptance == "same" else _pick, width=self.num_draft,
        )  # fmt: skip
        rows = np.array(tokens).tolist()
        guesses = [row[:limit] for row, limit in zip(rows, limits.tolist(), strict=True)]
        fed = [row + guess[: max(len(guess) - 1, 0)] for row, guess in zip(missing, guesses, strict=True)]
        waiting = dataclasses.replace(now, state=planes, fed=Fed(trace=trace, tokens=fed, num_given=num_given))
        return waiting, Proposal(tokens=guesses, probs=None if self.rule is None else probs)

    def settle(self, state: Following, num_rows: np.ndarray) -> Following:
        """Returns the state with what was emitted alone. Donates `state`."""
        return settled(self.model, state, num_rows)


def _facts(model: Model) -> tuple[int, str, tuple[int, str] | None]:
    """Returns the vocabulary, the path of a plane that nothing undoes, and what the rings can undo."""
    backend: Backend = model.backend
    struct = jax.eval_shape(lambda params: backend.functions.init(params, 1, 1), model.params)
    opaque = backend.layout.indices("opaque")
    path = backend.layout.paths[opaque[0]] if opaque else ""
    return backend.vocab_size(model.params, struct), path, backend.layout.undo_limit(backend.layout.leaves(struct))


def _given(missing: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the emitted tokens that are not yet in the state, `[B, 2]`, and how many there are, `[B]`."""
    given = np.zeros((len(missing), 2), np.int32)
    for number, row in enumerate(missing):
        given[number, : len(row)] = row
    return given, np.array([len(row) for row in missing], np.int32)


def _pick(picking: tuple, logits: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the token after each sequence `[B]` and what it was drawn from `[B, V]`; None if it is the likeliest."""
    return _picked(picking, logits, places, DRAFT)


def _pick_same(picking: tuple, logits: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """As `_pick`, with the noise of plain decoding's draw."""
    return _picked(picking, logits, places, None)


def _picked(picking: tuple, logits: jax.Array, places: jax.Array, purpose: int | None):
    cuts, key, emitted = picking
    if cuts is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None

    def one(row, index, logits):
        kept = kept_logits(logits, cuts)
        token = jax.random.categorical(place_key(key, row, index, purpose), kept)
        return token.astype(jnp.int32), jax.nn.softmax(kept)

    return jax.vmap(one)(jnp.arange(logits.shape[0]), emitted + places, logits)

"""The functions a backend is made of, each checked to keep the state's structure."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from statecore._errors import GeometryError
from statecore._typing import PyTree
from statecore.state import Layout


class InitFn(Protocol):
    """Makes an empty state. Zero is not every plane's empty value: that is init's to say."""

    def __call__(self, params: PyTree, batch: int, capacity: int) -> PyTree: ...


class StepFn(Protocol):
    """Takes one token of each sequence, `tokens` `[B]`, and gives logits `[B, V]`."""

    def __call__(self, params: PyTree, state: PyTree, tokens: jax.Array) -> tuple[PyTree, jax.Array]: ...


class ExtendFn(Protocol):
    """Takes a chunk, `tokens` `[B, T]`, of which `num_valid` `[B]` count; logits `[B, T, V]`.

    A padding row enters no plane, and `num_valid = 0` leaves a sequence as it was.
    """

    def __call__(
        self, params: PyTree, state: PyTree, tokens: jax.Array, num_valid: jax.Array
    ) -> tuple[PyTree, jax.Array]: ...


class VerifyFn(Protocol):
    """Reads a window, `tokens` `[B, K]`, and gives logits `[B, K, V]` and a trace.

    It writes append and sliding planes only. The trace holds the window's inputs, never
    a piece of the state: a piece of the state would cost the plane its donation.
    """

    def __call__(
        self, params: PyTree, state: PyTree, tokens: jax.Array, num_valid: jax.Array
    ) -> tuple[PyTree, jax.Array, PyTree]: ...


class ReplayFn(Protocol):
    """Advances the other planes over the first `num_rows` `[B]` rows of the trace."""

    def __call__(self, state: PyTree, trace: PyTree, num_rows: jax.Array) -> PyTree: ...


class Functions(NamedTuple):
    """What the user gave. `step` is never None: it comes from verify and replay if need be."""

    init: InitFn
    step: StepFn
    extend: ExtendFn | None
    verify: VerifyFn | None
    replay: ReplayFn | None


def keeps_structure(layout: Layout, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, whose first result is checked to be a state like the one given.

    The check runs while tracing, so it costs nothing later. The state is the argument
    before the trace or the tokens: the first of `replay`, the second of the others.
    """
    place = 0 if name == "replay" else 1

    def checked(*args):
        result = function(*args)
        new = result if name == "replay" else result[0]
        before, after = layout.leaves(args[place]), layout.leaves(new)
        for path, old, leaf in zip(layout.paths, before, after, strict=True):
            if (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
                raise GeometryError(
                    f"`{name}` returned plane `{path}` as {leaf.dtype}{list(leaf.shape)}, but was given "
                    f"{old.dtype}{list(old.shape)}. A state keeps its shapes and dtypes; is a cast missing?"
                )
        return result

    return checked


def step_from_verify(verify: VerifyFn, replay: ReplayFn) -> StepFn:
    """Returns a step that is a verify of one row and its replay."""

    def step(params, state, tokens):
        one = jax.numpy.ones_like(tokens)
        state, logits, trace = verify(params, state, tokens[:, None], one)
        return replay(state, trace, one), logits[:, 0]

    return step

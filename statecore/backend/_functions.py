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
    extend_last: ExtendFn | None
    verify: VerifyFn | None
    replay: ReplayFn | None


# Which planes each function may write; the others stay as they were.
WRITES: dict[str, tuple[str, ...]] = {
    "step": ("position", "append", "sliding", "shift", "recurrent", "opaque"),
    "extend": ("position", "append", "sliding", "shift", "recurrent", "opaque"),
    "extend_last": ("position", "append", "sliding", "shift", "recurrent", "opaque"),
    "verify": ("append", "sliding"),
    "replay": ("position", "shift", "recurrent", "opaque"),
}


def keeps_structure(layout: Layout, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, checked to give a state like the one it was given, and logits of the right axes.

    The checks run while tracing, so they cost nothing later. Planes that it may not write
    are taken from the state given, in and outside a trace alike. The state is the argument
    before the trace or the tokens: the first of `replay`, the second of the others.
    """
    place = 0 if name == "replay" else 1
    written = set(layout.indices(*WRITES[name]))

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
        kept = [after[i] if i in written else before[i] for i in range(len(before))]
        state = layout.unflatten(kept)
        if name == "replay":
            return state
        _check_logits(name, args[2][:, 0] if name == "extend_last" else args[2], result[1])
        return (state, *result[1:])

    return checked


def _check_logits(name: str, tokens: jax.Array, logits: jax.Array) -> None:
    if logits.ndim != tokens.ndim + 1 or logits.shape[:-1] != tokens.shape:
        raise GeometryError(
            f"`{name}` returned logits {list(logits.shape)} for tokens {list(tokens.shape)}, but must give one row of "
            f"logits a token: {list(tokens.shape)[:-1] + [tokens.shape[-1], 'V']}."
        )


def step_from_verify(verify: VerifyFn, replay: ReplayFn) -> StepFn:
    """Returns a step that is a verify of one row and its replay."""

    def step(params, state, tokens):
        one = jax.numpy.ones_like(tokens)
        state, logits, trace = verify(params, state, tokens[:, None], one)
        return replay(state, trace, one), logits[:, 0]

    return step

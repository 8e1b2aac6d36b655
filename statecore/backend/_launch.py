"""Compiled transitions: what is donated, what is moved by reference, what is copied.

The rule for every transition: its result shares no buffer with an argument that stays
usable. So a donating call moves by reference what the transition does not write, and a
call that does not donate copies it. Planes that a transition does not write are never
results of its jit, where they would be copied.

Nothing here checks anything; a plain caller goes through `_transitions`, a runtime
checks against its own mirror first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from statecore._pytree import check_unaliased, copy_leaves, is_traced, named_leaves, unshared
from statecore._typing import PyTree
from statecore.backend import _derive
from statecore.backend._backend import Backend, strong
from statecore.backend._functions import WRITES
from statecore.state import Layout

Split = tuple[list[jax.Array], list[jax.Array]]
Shared = tuple[int, ...]


class Loop(NamedTuple):
    """What a loop of windows does between transitions; all of it traceable.

    widths: that windows are cut to, growing; the last is `K`.
    goes_on: `goes_on(carry) -> bool`.
    guess: `guess(carry) -> (carry, window[B, K], counts[B])`; a sequence of count 0 has ended.
    accept: `accept(carry, logits[B, N, V], window[B, N], counts[B]) -> (carry, num_rows[B])`, `N` being 1
      after a step, of which the rows cannot be dropped.
    """

    widths: tuple[int, ...]
    goes_on: Callable[[Any], jax.Array]
    guess: Callable[[Any], tuple[Any, jax.Array, jax.Array]]
    accept: Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]


Pick = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array, PyTree]]


def _split(layout: Layout, state: PyTree, first: Sequence[int]) -> Split:
    leaves = layout.leaves(state)
    chosen = set(first)
    return [leaves[i] for i in first], [leaf for i, leaf in enumerate(leaves) if i not in chosen]


def _join(layout: Layout, first: Sequence[int], chosen: list, others: list) -> PyTree:
    by_index = dict(zip(first, chosen, strict=True))
    rest = iter(others)
    return layout.unflatten([by_index[i] if i in by_index else next(rest) for i in range(len(layout.planes))])


def _written(layout: Layout, name: str) -> tuple[int, ...]:
    """Returns which planes a transition may write, hence may be given to it for good."""
    return layout.indices(*WRITES["replay" if name == "commit" else name])


def split_written(layout: Layout, name: str, state: PyTree) -> Split:
    """Returns the leaves that the transition `name` may write, and the others."""
    return _split(layout, state, _written(layout, name))


def _consume(leaves: list[jax.Array]) -> None:
    """Deletes what was donated but not taken: a live NumPy view makes XLA copy silently."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and not leaf.is_deleted():
            leaf.delete()


def executable(backend: Backend, name: str, donate: bool, body: Callable, static: tuple = ()) -> Callable:
    """Returns the jitted `body(written, others, *args) -> (written, *results)`, built once."""

    def build():
        return jax.jit(body, donate_argnums=(0,) if donate else (), keep_unused=True)

    return backend.compile((name, donate, *static), build)


def _run(
    backend: Backend,
    name: str,
    donate: bool,
    state: PyTree,
    run: Callable,
    args: tuple,
    static: tuple = (),
    shared: Shared = (),
):
    """Runs `run(state, *args) -> (state, *results)` compiled, and puts the planes together.

    `shared` are the indices of planes that somebody else holds too: written, not donated.
    """
    layout = backend.layout
    indices = _written(layout, name)
    given = tuple(i for i in indices if i not in shared)
    written, others = _split(layout, state, given)
    donate = donate and not is_traced(args)
    if donate:
        check_unaliased(layout.named(state))

    def body(written, others, *args):
        new, *results = run(_join(layout, given, written, others), *args)
        return strong(_split(layout, new, indices)[0]), *results

    try:
        new, *results = executable(backend, name, donate, body, (*static, *shared))(written, others, *args)
    except (ValueError, jax.errors.JaxRuntimeError):
        # The one fault not looked for on each call, since parameters have many leaves.
        check_unaliased([*layout.named(state), *named_leaves({"arguments": args})])
        raise
    new = unshared(new)
    others = _split(layout, state, indices)[1]
    if donate and not is_traced(new):
        _consume(written)
    elif others:
        others = copy_leaves(others)
    return _join(layout, indices, new, others), *results


def step(backend: Backend, params: PyTree, state: PyTree, tokens, *, donate: bool, shared: Shared = ()):
    """Runs the backend's step: state and logits `[B, V]`."""

    def run(state, params, tokens):
        return backend.functions.step(params, state, tokens)

    return _run(backend, "step", donate, state, run, (params, tokens), shared=shared)


def step_live(
    backend: Backend, params: PyTree, state: PyTree, tokens, live, *, donate: bool, shared: Shared = ()
) -> tuple[PyTree, jax.Array]:
    """Takes one token in the rows where `live` `[B]`: state, and logits `[B, V]` that are NaN in the others."""

    def run(state, params, tokens, live):
        state, logits = backend.run_step(params, state, tokens, live)
        return state, blank(logits, live)

    return _run(backend, "step", donate, state, run, (params, tokens, live), ("live",), shared)


def decode(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens,
    picking: PyTree,
    pick: Pick,
    *,
    num_tokens: int,
    is_masked: bool,
    donate: bool,
    shared: Shared = (),
) -> tuple[PyTree, PyTree, PyTree]:
    """Runs `num_tokens` steps and what picks the token after each, in one scan.

    Each step has the bits of a step alone. Without `is_masked` every sequence must be live
    throughout, and no step pays for selecting.

    Args:
      backend: the model's functions.
      params: its parameters.
      state: of `B` sequences.
      tokens: `[B]`, the pending ones.
      picking: what `pick` carries from step to step.
      pick: `pick(picking, logits[B, V], tokens[B]) -> (picking, tokens[B], out)`; `picking.live`
        `[B]` says which sequences the next step advances. One object for one way to pick.
      num_tokens: steps.
      is_masked: whether sequences may end on the way.
      donate: whether `state` may be consumed.
      shared: as in `step`.

    Returns:
      the state, `picking` after the last step, and `out` of each step, stacked in front.
    """

    def run(state, params, tokens, picking):
        def one(carry, _):
            state, tokens, picking = carry
            if is_masked:
                state, logits = backend.run_step(params, state, tokens, picking.live)
            else:
                state, logits = backend.run_step_alone(params, state, tokens, picking.live)
            picking, tokens, out = pick(picking, logits, tokens)
            return (strong(state), tokens, picking), out

        (state, _, picking), outs = jax.lax.scan(one, (strong(state), tokens, picking), length=num_tokens)
        return state, picking, outs

    static = ("decode", pick, num_tokens, is_masked)
    return _run(backend, "step", donate, state, run, (params, tokens, picking), static, shared)


def speculate(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    carry: PyTree,
    loop: Loop,
    *,
    mode: str,
    donate: bool,
    shared: Shared = (),
) -> tuple[PyTree, PyTree]:
    """Guesses, verifies, accepts and commits until `loop` has enough, in one loop on the device.

    A round in which nothing is guessed is a step, which a window of one row would be dearer than.

    Args:
      backend: the model's functions.
      params: its parameters.
      state: of `B` sequences.
      carry: what `loop` carries.
      loop: what is done between transitions. One object for one way to do it.
      mode: of the verifies.
      donate: whether `state` may be consumed.
      shared: as in `step`.

    Returns:
      the state, and `carry` after the last round.
    """

    def run(state, params, carry):
        def verified(width, state, carry, window, counts):
            window = window[:, :width]
            state, logits, trace = backend.run_verify(params, state, window, counts, mode)
            carry, num_rows = loop.accept(carry, logits, window, counts)
            return strong(backend.run_commit(state, trace, num_rows, mode)), carry

        def stepped(state, carry, window, counts):
            state, logits = backend.run_step(params, state, window[:, 0], counts > 0)
            return strong(state), loop.accept(carry, logits[:, None], window[:, :1], counts)[0]

        def one(both):
            state, carry = both
            carry, window, counts = loop.guess(carry)
            choice = sum(jnp.max(counts) > width for width in (1, *loop.widths[:-1]))
            return jax.lax.switch(choice, transitions, state, carry, window, counts)

        transitions = [stepped, *[functools.partial(verified, width) for width in loop.widths]]

        return jax.lax.while_loop(lambda both: loop.goes_on(both[1]), one, (strong(state), carry))

    return _run(backend, "step", donate, state, run, (params, carry), ("speculate", loop, mode), shared)


def extend(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens,
    num_valid,
    *,
    logits: str,
    donate: bool,
    shared: Shared = (),
):
    """Runs a chunk: state and the logits asked for."""

    def run(state, params, tokens, num_valid):
        return read_chunk(backend, params, state, tokens, num_valid, logits)

    return _run(backend, "extend", donate, state, run, (params, tokens, num_valid), (logits,), shared)


def verify(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens,
    num_valid,
    *,
    mode: str,
    donate: bool,
    shared: Shared = (),
):
    """Runs a window: state with its rows written, logits `[B, K, V]` and the trace."""

    def run(state, params, tokens, num_valid):
        return backend.run_verify(params, state, tokens, num_valid, mode)

    return _run(backend, "verify", donate, state, run, (params, tokens, num_valid), (mode,), shared)


def draft(
    backend: Backend, params: PyTree, state: PyTree, given, num_given, num_rows, picking: PyTree, pick, *, width: int
) -> tuple[PyTree, jax.Array, PyTree, PyTree]:
    """Feeds `given` tokens and then those that `pick` picks; see `_derive.draft`. Donates `state`.

    The position stays where it was: `commit` in mode `exact` keeps any prefix of what was fed.
    """

    def run(state, params, given, num_given, num_rows, picking):
        functions, layout = backend.functions, backend.layout
        return _derive.draft(layout, functions.step, pick, params, state, given, num_given, num_rows, picking, width)

    args = (params, given, num_given, num_rows, picking)
    return _run(backend, "verify", True, state, run, args, ("draft", pick, width))


def commit(
    backend: Backend, state: PyTree, trace: PyTree, num_rows, *, mode: str, donate: bool, shared: Shared = ()
) -> PyTree:
    """Advances the planes a verify left alone; attention rows are only handed through to `replay` to read."""

    def run(state, trace, num_rows):
        return (backend.run_commit(state, trace, num_rows, mode),)

    return _run(backend, "commit", donate, state, run, (trace, num_rows), (mode,), shared)[0]


def read_chunk(backend: Backend, params, state, tokens, num_valid, wanted: str):
    """Returns the state after a chunk and the logits asked for, of which no others are computed if possible."""
    extend_last = backend.functions.extend_last
    if wanted == "last" and extend_last is not None and tokens.shape[1]:
        state, logits = extend_last(params, state, tokens, num_valid)
        return state, blank(logits, num_valid > 0)
    state, logits = backend.run_extend(params, state, tokens, num_valid)
    return state, wanted_logits(logits, num_valid, wanted)


def wanted_logits(logits: jax.Array, num_valid: jax.Array, wanted: str) -> jax.Array | None:
    """Returns all logits, those of each last valid row, or None; NaN where no row is valid."""
    if wanted == "none":
        return None
    if wanted == "last":
        last = jnp.maximum(num_valid - 1, 0)[:, None, None]
        chosen = jnp.take_along_axis(logits, last, axis=1)[:, 0] if logits.shape[1] else logits.sum(1)
        return blank(chosen, num_valid > 0)
    return blank(logits, jnp.arange(logits.shape[1]) < num_valid[:, None])


def blank(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns logits `[..., V]` with NaN where not `valid` `[...]`; integers have no NaN."""
    if not jnp.issubdtype(logits.dtype, jnp.inexact):
        return logits
    return jnp.where(valid[..., None], logits, jnp.array(jnp.nan, logits.dtype))

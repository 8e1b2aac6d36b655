"""Compiled transitions: what is donated, what is moved by reference, what is copied.

The rule for every transition: its result shares no buffer with an argument that stays
usable. So a donating call moves by reference what the transition does not write, and a
call that does not donate copies it. Planes that a transition does not write are never
results of its jit, where they would be copied.

Nothing here checks anything; a plain caller goes through `_transitions`, a runtime
checks against its own mirror first.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from statecore._pytree import check_unaliased, copy_leaves, is_traced, named_leaves, unshared
from statecore._typing import PyTree
from statecore.backend._backend import Backend, strong
from statecore.backend._functions import WRITES
from statecore.state import Layout

Split = tuple[list[jax.Array], list[jax.Array]]
Shared = tuple[int, ...]


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
        state, all_logits = backend.run_extend(params, state, tokens, num_valid)
        return state, wanted_logits(all_logits, num_valid, logits)

    return _run(backend, "extend", donate, state, run, (params, tokens, num_valid), (logits,), shared)


def verify(backend: Backend, params: PyTree, state: PyTree, tokens, num_valid, *, mode: str, donate: bool):
    """Runs a window: state with its rows written, logits `[B, K, V]` and the trace."""

    def run(state, params, tokens, num_valid):
        return backend.run_verify(params, state, tokens, num_valid, mode)

    return _run(backend, "verify", donate, state, run, (params, tokens, num_valid), (mode,))


def commit(
    backend: Backend, state: PyTree, trace: PyTree, num_rows, *, mode: str, donate: bool, shared: Shared = ()
) -> PyTree:
    """Advances the planes a verify left alone; attention rows are only handed through to `replay` to read."""

    def run(state, trace, num_rows):
        return (backend.run_commit(state, trace, num_rows, mode),)

    return _run(backend, "commit", donate, state, run, (trace, num_rows), (mode,), shared)[0]


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

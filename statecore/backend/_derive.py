"""What follows from `step` alone, bit for bit: masked steps, chunks, windows, commits.

Everything here is traceable and trusts its arguments: ranges were checked before.

The facts this rests on, each held by a test: a step inside a `lax.cond` whose predicate
is known only at run time has the bits of a step under its own jit, and so has a scan of
such steps. Selecting *after* the cond does not change them; selecting inside would let
the compiler fuse the selection into the step and contract it differently.
"""

import jax
import jax.numpy as jnp

from statecore._typing import PyTree
from statecore.backend._functions import StepFn
from statecore.state import Layout, Plane, choose_row, per_row, row_axis, set_row, take_row


def masked_step(
    layout: Layout, step: StepFn, params: PyTree, state: PyTree, tokens: jax.Array, live: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Returns the state one token on in the rows where `live` `[B]`, and logits `[B, V]`."""
    old = layout.leaves(state)
    lengths = old[layout.position]
    capacity = layout.capacity(old)
    # A full row that is masked out is shown its last slot: past the end, where a step
    # writes depends on its indexing (clamped, dropped or wrapped), and any may be wrong.
    shown_lengths = lengths if capacity is None else jnp.where(live, lengths, jnp.minimum(lengths, capacity - 1))
    shown = layout.with_lengths(state, shown_lengths)
    logits_struct = jax.eval_shape(step, params, shown, tokens)[1]

    def skip():
        return shown, jnp.zeros(logits_struct.shape, logits_struct.dtype)

    state, logits = jax.lax.cond(jnp.any(live), lambda: step(params, shown, tokens), skip)
    new = layout.leaves(state)
    merged = [
        _merge(plane, before, after, live, shown_lengths)
        for plane, before, after in zip(layout.planes, old, new, strict=True)
    ]
    return layout.unflatten(merged), logits


def step_alone(
    step: StepFn, params: PyTree, state: PyTree, tokens: jax.Array, live: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Returns the state one token on and logits `[B, V]`, where some sequence is live, as all must be then.

    The `lax.cond` is what keeps the compiler from fusing the step with what uses it.
    """
    logits_struct = jax.eval_shape(step, params, state, tokens)[1]

    def skip():
        return state, jnp.zeros(logits_struct.shape, logits_struct.dtype)

    return jax.lax.cond(jnp.any(live), lambda: step(params, state, tokens), skip)


def _merge(plane: Plane, old: jax.Array, new: jax.Array, live: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns `new` in the live rows and `old` in the others."""
    if plane.kind == "constant":
        return old
    if plane.kind in ("append", "sliding"):
        # A step writes one row; putting that row back costs less than selecting the plane.
        row = lengths % new.shape[row_axis(plane, new)] if plane.kind == "sliding" else lengths
        kept = choose_row(plane, new, live, take_row(plane, new, row), take_row(plane, old, row))
        return set_row(plane, new, row, kept)
    return jnp.where(per_row(plane, new, live), new, old)


def extend(
    layout: Layout, step: StepFn, params: PyTree, state: PyTree, tokens: jax.Array, num_valid: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Returns the state after `num_valid` `[B]` of `tokens` `[B, T]`, and logits `[B, T, V]`."""

    def body(state, row):
        index, token = row
        return masked_step(layout, step, params, state, token, index < num_valid)

    rows = jnp.arange(tokens.shape[1]), tokens.T
    state, logits = jax.lax.scan(body, state, rows)
    return state, jnp.moveaxis(logits, 0, 1)


def verify(
    layout: Layout, step: StepFn, params: PyTree, state: PyTree, tokens: jax.Array, num_valid: jax.Array
) -> tuple[PyTree, jax.Array, PyTree]:
    """Returns the state with only append and sliding rows written, logits, and every step.

    The trace is a dict: `steps`, for each shift and recurrent plane its value after each
    row, `[K, ...]`; `final`, for each opaque plane its value after the last valid row.
    """
    kept = layout.indices("shift", "recurrent")

    def body(state, row):
        index, token = row
        state, logits = masked_step(layout, step, params, state, token, index < num_valid)
        leaves = layout.leaves(state)
        return state, (logits, [leaves[i] for i in kept])

    rows = jnp.arange(tokens.shape[1]), tokens.T
    after, (logits, steps) = jax.lax.scan(body, state, rows)
    old, new = layout.leaves(state), layout.leaves(after)
    written = layout.indices("append", "sliding")
    state = layout.unflatten([new[i] if i in written else old[i] for i in range(len(old))])
    trace = {"steps": steps, "final": [new[i] for i in layout.indices("opaque")]}
    return state, jnp.moveaxis(logits, 0, 1), trace


def draft(layout, step, pick, params, state, given, num_given, num_rows, picking, width):
    """Returns what `verify` does for tokens that are picked on the way, and what was picked.

    Args:
      layout, step, params, state: the model's.
      pick: `pick(picking, logits[B, V], place[B]) -> (tokens[B], out)`; `place` counts the tokens picked
        before, and is below 0 while given tokens are fed.
      given: `[B, G]`, fed first.
      num_given: `[B]`, how many of them count, at least 1.
      num_rows: `[B]`, tokens fed in all.
      picking: what `pick` needs.
      width: picks of each sequence.

    Returns:
      the state with its rows written, the tokens `[B, width]` and `out` `[B, width, ...]` of each pick,
      and the trace.
    """
    kept = layout.indices("shift", "recurrent")
    most = given.shape[1] + width - 1

    def body(carry, index):
        state, token = carry
        fed = jnp.where(index < num_given, given[:, jnp.minimum(index, given.shape[1] - 1)], token)
        state, logits = masked_step(layout, step, params, state, fed, index < num_rows)
        token, out = pick(picking, logits, index - (num_given - 1))
        leaves = layout.leaves(state)
        return (state, token), (token, out, [leaves[i] for i in kept])

    (after, _), (tokens, outs, steps) = jax.lax.scan(body, (state, given[:, 0]), jnp.arange(most))
    old, new = layout.leaves(state), layout.leaves(after)
    written = layout.indices("append", "sliding")
    state = layout.unflatten([new[i] if i in written else old[i] for i in range(len(old))])
    places = jnp.minimum(num_given[:, None] - 1 + jnp.arange(width), most - 1)

    def at_places(leaf):
        return jax.vmap(lambda rows, at: rows[at], in_axes=(1, 0))(leaf, places)

    return state, at_places(tokens), jax.tree.map(at_places, outs), {"steps": steps, "final": []}


def select(layout: Layout, state: PyTree, trace: PyTree, num_rows: jax.Array) -> PyTree:
    """Returns the state after `num_rows` `[B]` rows of a derived verify.

    Zero rows take the untouched state. An opaque plane has only its final value: the
    caller allows nothing but all rows where there is one.
    """
    leaves = layout.leaves(state)
    for i, steps in zip(layout.indices("shift", "recurrent"), trace["steps"], strict=True):
        index = per_row(layout.planes[i], leaves[i], num_rows)
        # Below zero rows the index is out of range, and the state itself is taken.
        chosen = jnp.take_along_axis(steps, jnp.maximum(index - 1, 0)[None], axis=0)[0]
        leaves[i] = jnp.where(index > 0, chosen, leaves[i])
    for i, final in zip(layout.indices("opaque"), trace["final"], strict=True):
        leaves[i] = final
    leaves[layout.position] = leaves[layout.position] + num_rows
    return layout.unflatten(leaves)

"""Transitions inside a trace, where nothing can be read or raised.

A refused transition leaves the state as it was and marks it: every length `p` becomes
`~p`, which is negative. The mark needs no extra leaf, survives `vmap`, `scan` and
`while_loop`, sticks through later transitions, and is never shown to a model. The next
host call raises RefusedError. A refusal is whole: one bad row refuses all rows.
"""

import jax
import jax.numpy as jnp

from statecore._typing import PyTree
from statecore.backend._backend import Backend
from statecore.backend._launch import blank, wanted_logits
from statecore.backend._window import Window
from statecore.state import Layout, put, take


def is_refused(layout: Layout, state: PyTree) -> jax.Array:
    """Returns whether the state is marked: a bool scalar."""
    return jnp.any(layout.lengths(state) < 0)


def clear(layout: Layout, state: PyTree) -> PyTree:
    """Returns the state with its true lengths."""
    lengths = layout.lengths(state)
    return layout.with_lengths(state, jnp.where(lengths < 0, ~lengths, lengths))


def mark(layout: Layout, state: PyTree, refused: jax.Array) -> PyTree:
    """Returns the state, marked if `refused`. Its lengths must be true ones."""
    lengths = layout.lengths(state)
    return layout.with_lengths(state, jnp.where(refused, ~lengths, lengths))


def _wrong_tokens(backend: Backend, params, state, tokens, valid) -> jax.Array:
    vocab_size = backend.vocab_size(params, state)
    return jnp.any(valid & ((tokens < 0) | (tokens >= vocab_size)))


def _wrong_counts(counts: jax.Array, most) -> jax.Array:
    return jnp.any((counts < 0) | (counts > most))


def _no_room(layout: Layout, state: PyTree, num_new: jax.Array) -> jax.Array:
    leaves = layout.leaves(state)
    capacity = layout.capacity(leaves)
    if capacity is None:
        return jnp.zeros((), bool)
    return jnp.any(leaves[layout.position] + num_new > capacity)


def step(backend: Backend, params, state, tokens):
    """As `transitions.step`."""
    layout, marked = backend.layout, is_refused(backend.layout, state)
    state = clear(layout, state)
    tokens = jnp.asarray(tokens, jnp.int32)
    refused = marked | _no_room(layout, state, jnp.ones_like(tokens))
    refused |= _wrong_tokens(backend, params, state, tokens, True)
    live = jnp.broadcast_to(~refused, tokens.shape)
    state, logits = backend.run_step(params, state, jnp.where(refused, 0, tokens), live)
    return mark(layout, state, refused), blank(logits, live)


def extend(backend: Backend, params, state, tokens, num_valid, *, logits):
    """As `transitions.extend`."""
    layout, marked = backend.layout, is_refused(backend.layout, state)
    state = clear(layout, state)
    refused, tokens, num_valid = _clean_rows(backend, params, state, tokens, num_valid)
    refused |= marked
    num_valid = jnp.where(refused, 0, num_valid)
    state, all_logits = backend.run_extend(params, state, tokens, num_valid)
    return mark(layout, state, refused), wanted_logits(all_logits, num_valid, logits)


def _clean_rows(backend: Backend, params, state, tokens, num_valid):
    """Returns whether the rows must be refused, and tokens with 0 for padding."""
    tokens, num_valid = jnp.asarray(tokens, jnp.int32), jnp.asarray(num_valid, jnp.int32)
    valid = jnp.arange(tokens.shape[1]) < num_valid[:, None]
    refused = _wrong_counts(num_valid, tokens.shape[1])
    refused |= _no_room(backend.layout, state, num_valid)
    refused |= _wrong_tokens(backend, params, state, tokens, valid)
    return refused, jnp.where(valid & ~refused, tokens, 0), num_valid


def verify(backend: Backend, params, state, tokens, num_valid, *, mode) -> Window:
    """As `transitions.verify`."""
    layout, marked = backend.layout, is_refused(backend.layout, state)
    state = clear(layout, state)
    refused, tokens, num_valid = _clean_rows(backend, params, state, tokens, num_valid)
    limit = layout.undo_limit(layout.leaves(state))
    if limit is not None:
        refused |= jnp.any(num_valid > limit[0])
    refused |= marked
    num_valid = jnp.where(refused, 0, num_valid)
    state, logits, trace = backend.run_verify(params, state, tokens, num_valid, mode)
    return Window(
        state=mark(layout, state, refused),
        logits=blank(logits, jnp.arange(tokens.shape[1]) < num_valid[:, None]),
        num_valid=num_valid,
        trace=trace,
        mode=mode,
        origin=backend.origin,
    )


def commit(backend: Backend, window: Window, num_accepted):
    """As `transitions.commit`."""
    layout, marked = backend.layout, is_refused(backend.layout, window.state)
    state = clear(layout, window.state)
    num_rows = jnp.broadcast_to(jnp.asarray(num_accepted, jnp.int32), window.num_valid.shape)
    refused = marked | _wrong_counts(num_rows, window.num_valid)
    if layout.indices("opaque"):
        refused |= jnp.any(num_rows != window.num_valid)
    # Zero rows are the state before the window; an opaque plane has no such value here.
    opaque = layout.indices("opaque")
    before = layout.leaves(state)
    state = backend.run_commit(state, window.trace, jnp.where(refused, 0, num_rows), window.mode)
    after = layout.leaves(state)
    for i in opaque:
        after[i] = jnp.where(refused, before[i], after[i])
    return mark(layout, layout.unflatten(after), refused)


def take_rows(backend: Backend, state, rows):
    """As `transitions.take_rows`. Refused, each sequence stays where it was."""
    layout, marked = backend.layout, is_refused(backend.layout, state)
    leaves = layout.leaves(clear(layout, state))
    batch = leaves[layout.position].shape[0]
    rows = jnp.asarray(rows, jnp.int32)
    refused = marked | _wrong_counts(rows, batch - 1)
    same = jnp.minimum(jnp.arange(rows.shape[0]), batch - 1)
    state = layout.unflatten(take(layout, leaves, jnp.where(refused, same, rows)))
    return mark(layout, state, refused)


def put_rows(backend: Backend, state, rows, other):
    """As `transitions.put_rows`."""
    layout = backend.layout
    refused = is_refused(layout, state) | is_refused(layout, other)
    leaves, new = layout.leaves(clear(layout, state)), layout.leaves(clear(layout, other))
    batch = leaves[layout.position].shape[0]
    rows = jnp.asarray(rows, jnp.int32)
    ordered = jnp.sort(rows)
    refused |= _wrong_counts(rows, batch - 1) | jnp.any(ordered[1:] == ordered[:-1])
    # Past the end nothing is written, so a refused call changes no row.
    where = jnp.where(refused, batch, rows)
    state = layout.unflatten(put(layout, leaves, where, new))
    return mark(layout, state, refused)

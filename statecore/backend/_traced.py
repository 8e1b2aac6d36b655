"""Transitions inside a trace, where nothing can be read or raised.

A refused transition leaves the state as it was and marks it: every length `p` becomes
`~p`, which is negative. The mark needs no extra leaf, survives `vmap`, `scan` and
`while_loop`, sticks through later transitions, and is never shown to a model. The next
host call raises RefusedError. A refusal is whole: one bad row refuses all rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError
from statecore.backend import _checks as checks
from statecore.backend._backend import Backend
from statecore.backend._launch import blank, read_chunk
from statecore.backend._window import Window
from statecore.state import Layout, equality, put, state_geometry, take


def is_refused(layout: Layout, state) -> jax.Array:
    """Returns whether the state is marked: a bool scalar."""
    return jnp.any(layout.lengths(state) < 0)


def clear(layout: Layout, state):
    """Returns the state with its true lengths."""
    lengths = layout.lengths(state)
    return layout.with_lengths(state, jnp.where(lengths < 0, ~lengths, lengths))


def mark(layout: Layout, state, refused: jax.Array):
    """Returns the state, marked if `refused`. Its lengths must be true ones."""
    lengths = layout.lengths(state)
    return layout.with_lengths(state, jnp.where(refused, ~lengths, lengths))


def _wrong_tokens(backend: Backend, params, state, tokens, valid) -> jax.Array:
    vocab_size = backend.vocab_size(params, state)
    return jnp.any(valid & ((tokens < 0) | (tokens >= vocab_size)))


def _wrong_counts(counts: jax.Array, most) -> jax.Array:
    return jnp.any((counts < 0) | (counts > most))


def _no_room(layout: Layout, state, num_new: jax.Array) -> jax.Array:
    leaves = layout.leaves(state)
    capacity = layout.capacity(leaves)
    if capacity is None:
        return jnp.zeros((), bool)
    return jnp.any(leaves[layout.position] + num_new > capacity)


def step(backend: Backend, params, state, tokens):
    """As `transitions.step`."""
    layout, marked = backend.layout, is_refused(backend.layout, state)
    state = clear(layout, state)
    tokens = checks.traced_ints(tokens, "tokens", layout.lengths(state).shape)
    refused = marked | _no_room(layout, state, jnp.ones_like(tokens))
    refused |= _wrong_tokens(backend, params, state, tokens, True)
    live = jnp.broadcast_to(~refused, tokens.shape)
    state, logits = backend.run_step(params, state, jnp.where(refused, 0, tokens).astype(jnp.int32), live)
    return mark(layout, state, refused), blank(logits, live)


def extend(backend: Backend, params, state, tokens, num_valid, *, logits):
    """As `transitions.extend`."""
    layout, marked = backend.layout, is_refused(backend.layout, state)
    state = clear(layout, state)
    refused, tokens, num_valid = _clean_rows(backend, params, state, tokens, num_valid)
    refused |= marked
    num_valid = jnp.where(refused, 0, num_valid)
    state, wanted = read_chunk(backend, params, state, tokens, num_valid, logits)
    return mark(layout, state, refused), wanted


def _clean_rows(backend: Backend, params, state, tokens, num_valid):
    """Returns whether the rows must be refused, tokens with 0 for padding, and counts `[B]`."""
    (batch,) = backend.layout.lengths(state).shape
    tokens = checks.traced_ints(tokens, "tokens", (batch, None))
    counts = _counts(tokens.shape[1] if num_valid is None else num_valid, "num_valid", batch)
    valid = jnp.arange(tokens.shape[1]) < counts[:, None]
    refused = _wrong_counts(counts, tokens.shape[1])
    refused |= _no_room(backend.layout, state, counts)
    refused |= _wrong_tokens(backend, params, state, tokens, valid)
    return refused, jnp.where(valid & ~refused, tokens, 0).astype(jnp.int32), counts.astype(jnp.int32)


def _counts(value, what: str, batch: int) -> jax.Array:
    """Returns counts `[B]`; one number counts for every sequence."""
    shape = () if np.ndim(value) == 0 else (batch,)
    return jnp.broadcast_to(checks.traced_ints(value, what, shape), (batch,))


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
    num_rows = _counts(num_accepted, "num_accepted", window.num_valid.shape[0])
    refused = marked | _wrong_counts(num_rows, window.num_valid)
    num_rows = num_rows.astype(jnp.int32)
    # Zero rows are the state before the window; an opaque plane has no such value here.
    opaque = layout.indices("opaque")
    if opaque:
        refused |= jnp.any(num_rows != window.num_valid)
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
    rows = _rows(rows)
    refused = marked | _wrong_counts(rows, batch - 1)
    same = jnp.minimum(jnp.arange(rows.shape[0]), batch - 1)
    state = layout.unflatten(take(layout, leaves, jnp.where(refused, same, rows).astype(jnp.int32)))
    return mark(layout, state, refused)


def put_rows(backend: Backend, state, rows, other):
    """As `transitions.put_rows`."""
    layout = backend.layout
    refused = is_refused(layout, state) | is_refused(layout, other)
    leaves, new = layout.leaves(clear(layout, state)), layout.leaves(clear(layout, other))
    batch = leaves[layout.position].shape[0]
    rows = _rows(rows)
    check_fits(layout, state, other, rows.shape[0])
    for plane, a, b in zip(layout.planes, leaves, new, strict=True):
        if plane.batch_axis is None:
            refused |= jnp.any(equality.bits(a) != equality.bits(b))
    ordered = jnp.sort(rows)
    refused |= _wrong_counts(rows, batch - 1) | jnp.any(ordered[1:] == ordered[:-1])
    # Past the end nothing is written, so a refused call changes no row.
    where = jnp.where(refused, batch, rows).astype(jnp.int32)
    state = layout.unflatten(put(layout, leaves, where, new))
    return mark(layout, state, refused)


def _rows(rows) -> jax.Array:
    rows = checks.traced_ints(rows, "rows", (None,))
    if not rows.shape[0]:
        raise GeometryError("rows must name at least one row.")
    return rows


def check_fits(layout: Layout, state, other, num_rows: int) -> None:
    """Raises GeometryError unless `other` is a state of `num_rows` sequences, otherwise like `state`."""
    index = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    wanted = jax.eval_shape(lambda s, i: layout.unflatten(take(layout, layout.leaves(s), i)), state, index)
    faults = state_geometry(layout, wanted).differences(state_geometry(layout, other))
    if faults:
        raise GeometryError(
            f"`other` is not a state of {num_rows} sequences like this one: " + "; ".join(faults) + ". Were its batch "
            "or capacity others?"
        )

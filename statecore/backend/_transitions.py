"""The transitions on values, and the one door that decides whether they are traced.

Outside a trace each checks everything on the host, raises before anything runs, and
runs compiled. Inside a trace each follows `_traced`. By default a value stays usable
after it was advanced; with `donate=True` it is consumed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, IdentityError, UnsupportedError
from statecore._pytree import check_alive, copy_leaves, is_traced
from statecore._typing import IntLike, PyTree
from statecore.backend import _checks, _launch, _traced
from statecore.backend._backend import Backend
from statecore.backend._window import Window
from statecore.state import Layout, equality, put, row_axis, take


def read_lengths(backend: Backend, state: PyTree) -> np.ndarray:
    """Returns the length of each sequence, `[B]`, and so waits for the device.

    Raises:
      GeometryError: the state does not mirror the backend's planes.
      StateConsumedError: the state was donated.
      RefusedError: a transition inside a trace was refused before.
    """
    check_alive(backend.layout.named(state))
    lengths = _checks.host_ints(backend.layout.lengths(state), "position")
    if lengths.ndim != 1:
        raise GeometryError(
            f"The position is {list(lengths.shape)}, but one state has [B] lengths. Are several states stacked? Then "
            "call this under `jax.vmap`."
        )
    _checks.check_lengths(lengths)
    return lengths


def step(
    backend: Backend, params: PyTree, state: PyTree, tokens: IntLike, *, donate: bool = False
) -> tuple[PyTree, jax.Array]:
    """Takes one token of each sequence. Donates `state` if `donate`.

    Args:
      backend: the model's functions.
      params: its parameters.
      state: of `B` sequences.
      tokens: `[B]` integers.
      donate: whether `state` may be consumed, which saves copying it.

    Returns:
      the state one token on, and logits `[B, V]` for the next token.

    Raises:
      GeometryError: shapes do not fit, or a token is outside the vocabulary.
      CapacityError: an append plane is full.
      StateConsumedError, RefusedError, AliasError: the state cannot be used.
    """
    if is_traced(state, tokens):
        return _traced.step(backend, params, state, tokens)
    lengths = read_lengths(backend, state)
    array = _checks.check_tokens(tokens, len(lengths), 1)
    array = _checks.check_vocab(array, None, backend.vocab_size(params, state))
    capacity = backend.layout.capacity(backend.layout.leaves(state))
    _checks.check_room(backend.layout, lengths, np.ones_like(lengths), capacity)
    return _launch.step(backend, params, state, array, donate=donate)


def extend(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens: IntLike,
    *,
    num_valid: IntLike | None = None,
    logits: str = "all",
    donate: bool = False,
) -> tuple[PyTree, jax.Array | None]:
    """Takes a prompt or a chunk. Donates `state` if `donate`.

    Args:
      backend: the model's functions.
      params: its parameters.
      state: of `B` sequences.
      tokens: `[B, T]` integers; what stands in padding rows does not matter.
      num_valid: `[B]`, or an int for all, how many tokens of each row count; all if None.
      logits: `all` for `[B, T, V]`, `last` for `[B, V]` after each row's last valid
        token, `none` for None. NaN where no valid token stands.
      donate: whether `state` may be consumed.

    Returns:
      the state `num_valid` tokens on, and the logits.

    Raises:
      GeometryError, CapacityError, StateConsumedError, RefusedError, AliasError: as `step`.
    """
    _checks.check_logits(logits)
    if is_traced(state, tokens, num_valid):
        return _traced.extend(backend, params, state, tokens, num_valid, logits=logits)
    array, counts = checked_rows(backend, params, state, tokens, num_valid)
    return _launch.extend(backend, params, state, array, counts, logits=logits, donate=donate)


def verify(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens: IntLike,
    *,
    num_valid: IntLike | None = None,
    mode: str | None = None,
    donate: bool = False,
) -> Window:
    """Reads a window without deciding how much of it counts. Donates `state` if `donate`.

    Writes the attention rows of the window and leaves every other plane untouched, so
    that `commit` can keep any prefix.

    Args:
      backend: the model's functions.
      params: its parameters.
      state: of `B` sequences.
      tokens: `[B, K]`; row 0 is the anchor, which has been emitted and is not yet in the
        state.
      num_valid: `[B]`, or an int for all, how many rows count; all if None.
      mode: `exact` scans single steps and has the bits of decoding; `fast` is the
        backend's own verify, equal up to rounding. None takes `fast` where there is one.
      donate: whether `state` may be consumed.

    Returns:
      the window, with its logits `[B, K, V]`.

    Raises:
      RollbackError: a ring could not undo a window this wide.
      UnsupportedError: `fast` was asked of a backend that has only `step`.
      GeometryError, CapacityError, StateConsumedError, RefusedError, AliasError: as `step`.
    """
    mode = check_mode(backend, mode)
    if not is_traced(tokens):
        tokens = _checks.host_ints(tokens, "tokens")
    _checks.check_window(np.shape(tokens))
    if is_traced(state, tokens, num_valid):
        if num_valid is None:
            limit = backend.layout.undo_limit(backend.layout.leaves(state))
            _checks.check_undo(limit, np.array([np.shape(tokens)[1]]))
        return _traced.verify(backend, params, state, tokens, num_valid, mode=mode)
    array, counts = checked_rows(backend, params, state, tokens, num_valid)
    _checks.check_undo(backend.layout.undo_limit(backend.layout.leaves(state)), counts)
    state, logits, trace = _launch.verify(backend, params, state, array, counts, mode=mode, donate=donate)
    return Window(
        state=state, logits=logits, num_valid=jnp.asarray(counts), trace=trace, mode=mode, origin=backend.origin
    )


def commit(backend: Backend, window: Window, num_accepted: IntLike, *, donate: bool = False) -> PyTree:
    """Makes the first `num_accepted` rows of a window the state. Donates the window's state if `donate`.

    Args:
      backend: the one that verified.
      window: from `verify`; it may be committed again at another count unless donated.
      num_accepted: rows kept, the anchor included: an int, or `[B]`, from 0 to the
        window's `num_valid`.
      donate: whether the window's state may be consumed.

    Returns:
      the state after the kept rows: what feeding them one by one would have given.

    Raises:
      RollbackError: the count is out of range, or an opaque plane would have to go back.
      IdentityError: the window is another backend's.
      StateConsumedError: the window's state is gone.
    """
    if not isinstance(window, Window):
        raise GeometryError(f"`commit` takes the window that `verify` returned, but was given {type(window).__name__}.")
    if window.origin is not backend.origin:
        raise IdentityError(
            f"This window was verified by another backend than {backend!r}. Commit it with the backend that made "
            "it; a rebuilt backend is another one."
        )
    if is_traced(window, num_accepted):
        return _traced.commit(backend, window, num_accepted)
    check_alive(backend.layout.named(window.state), "window")
    read_lengths(backend, window.state)
    num_valid = _checks.host_ints(window.num_valid, "num_valid")
    counts = _checks.check_accepted(num_accepted, num_valid)
    _checks.check_opaque(backend.layout, counts, num_valid)
    counts = counts.astype(np.int32)
    return _launch.commit(backend, window.state, window.trace, counts, mode=window.mode, donate=donate)


def take_rows(backend: Backend, state: PyTree, rows: IntLike) -> PyTree:
    """Returns a state whose sequence `i` is sequence `rows[i]`, in every plane.

    Args:
      backend: the model's functions.
      state: of `B` sequences.
      rows: `[N]` integers from 0 to `B - 1`, in any order, repeated or not.

    Raises:
      GeometryError: a row is out of range, or `rows` is not a list of at least one row.
    """
    if is_traced(state, rows):
        return _traced.take_rows(backend, state, rows)
    batch = len(read_lengths(backend, state))
    index = _check_rows(rows, batch)
    layout = backend.layout

    def body(leaves, index):
        return take(layout, leaves, index)

    run = backend.compile(("take_rows",), lambda: jax.jit(body))
    return layout.unflatten(run(layout.leaves(state), index))


def put_rows(backend: Backend, state: PyTree, rows: IntLike, other: PyTree) -> PyTree:
    """Returns `state` with the sequences of `other` in rows `rows`.

    Args:
      backend: the model's functions.
      state: of `B` sequences.
      rows: `[N]` different integers from 0 to `B - 1`.
      other: a state of `N` sequences, of the same capacity and dtypes.

    Raises:
      GeometryError: a row is out of range or named twice, or `other` does not fit.
    """
    if is_traced(state, rows, other):
        return _traced.put_rows(backend, state, rows, other)
    batch = len(read_lengths(backend, state))
    read_lengths(backend, other)
    index = _check_rows(rows, batch)
    if len(set(index.tolist())) != len(index):
        raise GeometryError(f"rows {index.tolist()} name a row twice, and which sequence would stay is undefined.")
    layout = backend.layout
    _traced.check_fits(layout, state, other, len(index))
    _check_shared(layout, state, other)

    def body(leaves, index, new):
        return put(layout, leaves, index, new)

    run = backend.compile(("put_rows",), lambda: jax.jit(body))
    return layout.unflatten(run(layout.leaves(state), index, layout.leaves(other)))


def equal(backend: Backend, a: PyTree, b: PyTree) -> bool | jax.Array:
    """Returns whether two states have the same bits in everything that can be read.

    Rows past the position do not count, nor do a ring's rows older than its window;
    capacities may differ. NaN equals NaN of the same bits; -0.0 is not 0.0. Inside a
    trace the answer is a bool array.

    Raises:
      GeometryError: the states have other structures, batches or dtypes.
      StateConsumedError: one of them was donated.
    """
    differs = _differs(backend, a, b)
    return ~jnp.any(differs) if is_traced(differs) else not np.array(differs).any()


def differing_planes(backend: Backend, a: PyTree, b: PyTree) -> tuple[str, ...]:
    """Returns the paths of the planes in which two states differ; host only. See `equal`."""
    differs = np.array(_differs(backend, a, b))
    return tuple(path for path, wrong in zip(backend.layout.paths, differs, strict=True) if wrong)


def _differs(backend: Backend, a: PyTree, b: PyTree) -> jax.Array:
    """Returns whether each plane differs, `[planes]` bool."""
    layout = backend.layout
    check_alive(layout.named(a))
    check_alive(layout.named(b))
    _check_comparable(backend, a, b)

    def body(a, b):
        return jnp.stack(equality.plane_differs(layout, a, b))

    run = backend.compile(("differs",), lambda: jax.jit(body))
    return run(layout.leaves(a), layout.leaves(b))


def is_refused(backend: Backend, state: PyTree) -> jax.Array:
    """Returns whether a transition inside a trace was refused on this state: a bool scalar."""
    check_alive(backend.layout.named(state))
    return _traced.is_refused(backend.layout, state)


def clear_refusal(backend: Backend, state: PyTree) -> PyTree:
    """Returns the state as it was before the refused transition, usable again."""
    check_alive(backend.layout.named(state))
    state = _traced.clear(backend.layout, state)
    return state if is_traced(state) else copy_leaves(state)


def check_mode(backend: Backend, mode: str | None) -> str:
    """Returns `exact` or `fast`; raises UnsupportedError for what the backend has not."""
    if mode is None:
        return "fast" if backend.has_fast_verify else "exact"
    if mode not in ("exact", "fast"):
        raise UnsupportedError(f"mode={mode!r} is not one of exact, fast.")
    if mode == "fast" and not backend.has_fast_verify:
        raise UnsupportedError(
            f"mode='fast' needs a `verify` and a `replay`, but {backend.name} has only `step`. Use mode='exact'."
        )
    return mode


def checked_rows(backend: Backend, params, state, tokens, num_valid) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 tokens `[B, T]` and counts `[B]`, all checks passed."""
    lengths = read_lengths(backend, state)
    array = _checks.check_tokens(tokens, len(lengths), 2)
    counts = _checks.check_rows_counts(num_valid, len(lengths), array.shape[1], "num_valid")
    valid = np.arange(array.shape[1]) < counts[:, None]
    array = _checks.check_vocab(array, valid, backend.vocab_size(params, state))
    capacity = backend.layout.capacity(backend.layout.leaves(state))
    _checks.check_room(backend.layout, lengths, counts, capacity)
    return array, counts.astype(np.int32)


def _check_rows(given: IntLike, batch: int) -> np.ndarray:
    index = _checks.host_ints(given, "rows")
    if index.ndim != 1 or not index.size:
        raise GeometryError(f"rows have shape {list(index.shape)}, but must be a list of at least one row.")
    wrong = index[(index < 0) | (index >= batch)]
    if wrong.size:
        raise GeometryError(f"Row {wrong[0]} does not exist: the state has {batch} sequences, 0 to {batch - 1}.")
    return index.astype(np.int32)


def _check_comparable(backend: Backend, a: PyTree, b: PyTree) -> None:
    layout = backend.layout
    for path, plane, left, right in zip(layout.paths, layout.planes, layout.leaves(a), layout.leaves(b), strict=True):
        shapes = [list(left.shape), list(right.shape)]
        if plane.kind in ("append", "sliding") and left.ndim == right.ndim:
            for shape in shapes:
                shape[row_axis(plane, left)] = -1  # capacities may differ
        if shapes[0] != shapes[1] or left.dtype != right.dtype:
            raise GeometryError(
                f"Plane `{path}` is {left.dtype}{list(left.shape)} in one state and {right.dtype}{list(right.shape)} "
                "in the other, so they cannot be compared. Are both from this backend, at one batch?"
            )


def _check_shared(layout: Layout, state: PyTree, other: PyTree) -> None:
    """Raises GeometryError if a plane that all sequences share is another one in `other`."""
    for path, plane, a, b in zip(layout.paths, layout.planes, layout.leaves(state), layout.leaves(other), strict=True):
        if plane.batch_axis is None and not bool(jnp.array_equal(equality.bits(a), equality.bits(b))):
            raise GeometryError(
                f"Plane `{path}` is shared by all sequences and differs in `other`, so its sequences would go on with "
                "another one than they began with."
            )

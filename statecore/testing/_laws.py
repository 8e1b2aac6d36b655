"""The laws of a state, as functions of a backend that return or raise.

Each takes one case, so that Hypothesis, a table or a person may choose it. A
`LawViolation` names the law, the planes that differ and the case.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import StateError
from statecore._pytree import buffers, named_leaves
from statecore._typing import PyTree
from statecore.backend import Backend, commit, differing_planes, extend, step, verify
from statecore.native import capture, exchange
from statecore.state import equality


class LawViolation(AssertionError):
    """A law of states does not hold for a backend.

    law: which one.
    paths: the planes that differ from what they must be.
    """

    def __init__(self, law: str, paths: Sequence[str], case: str):
        self.law, self.paths = law, tuple(paths)
        super().__init__(f"{law}: plane {', '.join(f'`{path}`' for path in paths)} is wrong for {case}")


def assert_same(
    backend: Backend, got: PyTree, wanted: PyTree, *, law: str, case: str, tolerance: float | None = None
) -> None:
    """Raises LawViolation unless two states agree in all that can be read of them.

    Args:
      backend: of both states.
      got: the state under test.
      wanted: what it must be.
      law: for the message.
      case: for the message.
      tolerance: the greatest difference relative to each plane's greatest value; None
        asks for the same bits.
    """
    if tolerance is None:
        wrong = differing_planes(backend, got, wanted)
    else:
        wrong = tuple(path for path, gap in relative_gaps(backend, got, wanted).items() if not gap <= tolerance)
    if wrong:
        raise LawViolation(law, wrong, case)


def relative_gaps(backend: Backend, got: PyTree, wanted: PyTree) -> dict[str, float]:
    """Returns, by plane, the greatest difference over the plane's greatest value.

    Integer planes count as infinitely far apart if anything differs.
    """
    layout = backend.layout
    ours = equality.readable(layout, layout.leaves(got))
    theirs = equality.readable(layout, layout.leaves(wanted))
    gaps = {}
    for path, left, right in zip(layout.paths, ours, theirs, strict=True):
        if not jnp.issubdtype(left.dtype, jnp.floating):
            gaps[path] = 0.0 if bool(jnp.all(left == right)) else np.inf
            continue
        a, b = np.array(left, np.float64), np.array(right, np.float64)
        gaps[path] = float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30))
    return gaps


def raw_states(backend: Backend, params: PyTree, state: PyTree, tokens: np.ndarray) -> list[PyTree]:
    """Returns the states after 0, 1, ... T calls of the backend's own step, each under its own jit."""
    run = backend.compile(("law: raw step",), lambda: jax.jit(backend.functions.step))
    states = [state]
    for column in np.array(tokens, np.int32).T:
        states.append(run(params, states[-1], column)[0])
    return states


def pick_rows(backend: Backend, states: list[PyTree], counts: Sequence[int]) -> PyTree:
    """Returns one state whose sequence `b` is that of `states[counts[b]]`."""
    layout = backend.layout
    leaves = []
    for plane, *steps in zip(layout.planes, *map(layout.leaves, states), strict=True):
        axis = plane.batch_axis
        if axis is None:
            leaves.append(steps[0])
            continue
        rows = [jax.lax.index_in_dim(steps[n], b, axis % steps[n].ndim) for b, n in enumerate(counts)]
        leaves.append(jnp.concatenate(rows, axis=axis))
    return layout.unflatten(leaves)


def check_commit(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    window: Any,
    num_accepted: Sequence[int],
    *,
    num_valid: Sequence[int] | None = None,
    mode: str | None = None,
    tolerance: float | None = None,
) -> PyTree:
    """Law 1: a verify and a commit of `n` rows are `n` steps, for each sequence.

    Args:
      backend: under test.
      params: its parameters.
      state: to start from.
      window: `[B, K]` tokens.
      num_accepted: rows kept, for each sequence.
      num_valid: valid rows, for each sequence; all if None. Padding may hold anything.
      mode: of the verify.
      tolerance: None for the same bits.

    Returns:
      the committed state.
    """
    window = np.array(window)
    kept = max(num_accepted, default=0)
    before = jax.tree.map(np.array, state)
    wanted = pick_rows(
        backend, raw_states(backend, params, state, _unpadded(window, num_valid)[:, :kept]), num_accepted
    )
    opened = verify(backend, params, state, window, num_valid=num_valid, mode=mode)
    got = commit(backend, opened, np.array(num_accepted))
    case = f"window {window.tolist()}, valid {num_valid}, kept {list(num_accepted)}, mode {opened.mode}"
    assert_same(backend, got, wanted, law="commit is steps", case=case, tolerance=tolerance)
    _assert_unchanged(before, state, "a verify leaves its argument alone", case)
    return got


def _unpadded(window: np.ndarray, num_valid: Sequence[int] | None) -> np.ndarray:
    if num_valid is None:
        return window
    return np.where(np.arange(window.shape[1]) < np.array(num_valid)[:, None], window, 0)


def check_chunks(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens: Any,
    cuts: Sequence[int],
    *,
    tolerance: float | None = None,
) -> PyTree:
    """Law 2: feeding a text in chunks is feeding it token by token, wherever it is cut.

    Args:
      backend: under test.
      params: its parameters.
      state: to start from.
      tokens: `[B, T]`.
      cuts: where to cut, ascending, each from 0 to `T`.
      tolerance: None for the same bits.

    Returns:
      the state after all tokens.
    """
    tokens = np.array(tokens)
    bounds = [0, *cuts, tokens.shape[1]]
    got, logits = state, []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        got, new = extend(backend, params, got, tokens[:, start:stop])
        logits.append(new)
    wanted = raw_states(backend, params, state, tokens)[-1]
    case = f"tokens {tokens.tolist()} cut at {list(cuts)}"
    assert_same(backend, got, wanted, law="chunks are steps", case=case, tolerance=tolerance)
    return got


def check_padding(
    backend: Backend,
    params: PyTree,
    state: PyTree,
    tokens: Any,
    num_valid: Sequence[int],
    *,
    tolerance: float | None = None,
) -> PyTree:
    """Law 2: padding never enters a state. `tokens` `[B, T]` may hold anything as padding."""
    tokens = np.array(tokens)
    wanted = pick_rows(backend, raw_states(backend, params, state, _unpadded(tokens, num_valid)), num_valid)
    got, _ = extend(backend, params, state, tokens, num_valid=np.array(num_valid))
    case = f"tokens {tokens.tolist()}, valid {list(num_valid)}"
    assert_same(backend, got, wanted, law="padding never enters", case=case, tolerance=tolerance)
    return got


def check_exchange(a: PyTree, b: PyTree) -> None:
    """Law 3: exchanging twice gives the same two states back, in the same buffers."""
    before = [buffers(leaf) for leaf in jax.tree.leaves((a, b))]
    once = exchange(a, b)
    after = [buffers(leaf) for leaf in jax.tree.leaves(exchange(*once))]
    swapped = [buffers(leaf) for leaf in jax.tree.leaves((once[1], once[0]))]
    if before != after or before != swapped:
        raise LawViolation("exchange moves nothing", [name for name, _ in named_leaves(a)], "two exchanges")


def check_capture(backend: Backend, params: PyTree, state: PyTree, tokens: Any) -> PyTree:
    """Law 4: a capture never changes, whatever happens to its source. Donates `state`.

    Args:
      backend: under test.
      params: its parameters.
      state: captured, then advanced over `tokens` `[B, T]` and consumed.
      tokens: what it is advanced over.

    Returns:
      the capture.
    """
    before = jax.tree.map(np.array, state)
    saved = capture(state)
    again = capture(state, into=capture(state))
    for column in np.array(tokens).T:
        state, _ = step(backend, params, state, column, donate=True)
    for held in (saved, again):
        _assert_unchanged(before, held, "a capture never changes", f"{np.array(tokens).tolist()} fed to its source")
    return saved


def check_refusal(backend: Backend, state: PyTree, operation: Any, error: type[StateError]) -> StateError:
    """Law 5: an operation that is refused raises `error` and leaves `state` bit for bit as it was.

    Returns:
      the error.
    """
    before = jax.tree.map(np.array, state)
    try:
        operation()
    except error as refusal:
        _assert_unchanged(before, state, "a refused operation changes nothing", repr(refusal))
        return refusal
    raise LawViolation("a wrong operation is refused", backend.layout.paths, f"{error.__name__} was not raised")


def check_every_plane(backend: Backend, state: PyTree) -> None:
    """Law 8: a change of any readable element is seen, and seen in its own plane."""
    layout = backend.layout
    leaves = layout.leaves(state)
    row = int(np.argmax(np.array(layout.lengths(state))))
    for number, (path, plane) in enumerate(zip(layout.paths, layout.planes, strict=True)):
        index = _readable_index(plane, leaves[number], np.array(layout.lengths(state)), row)
        if index is None:
            continue
        changed = list(leaves)
        changed[number] = leaves[number].at[index].add(jnp.ones((), leaves[number].dtype))
        seen = differing_planes(backend, state, layout.unflatten(changed))
        expected = path in seen if plane.kind == "position" else seen == (path,)
        if not expected:
            raise LawViolation("every plane is seen", [path], f"element {index} changed, seen in {seen}")


def _readable_index(plane, leaf, lengths: np.ndarray, row: int) -> tuple[int, ...] | None:
    """Returns an element of `leaf` that can be read of sequence `row`; None if there is none."""
    if leaf.size == 0:
        return None
    index = [0] * leaf.ndim
    if plane.batch_axis is not None:
        index[plane.batch_axis] = row
    if plane.kind in ("append", "sliding"):
        if lengths[row] == 0 or (plane.kind == "sliding" and plane.size == 1):
            return None
        index[plane.axis] = int(lengths[row] - 1) % leaf.shape[plane.axis]
    return tuple(index)


def _assert_unchanged(before: PyTree, state: PyTree, law: str, case: str) -> None:
    wrong = [
        name
        for (name, old), (_, leaf) in zip(named_leaves(before), named_leaves(state), strict=True)
        if leaf.is_deleted() or np.array(leaf).tobytes() != old.tobytes()
    ]
    if wrong:
        raise LawViolation(law, wrong, case)

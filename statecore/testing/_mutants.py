"""Backends with a planted fault, each of which the laws must catch."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.runtime import Runtime, Slot


def forgets_conv(backend: Backend) -> Backend:
    """Returns `backend` with a commit that leaves shift planes where they were before the window."""

    def replay(state, trace, num_rows, right):
        return _with_planes(backend, right(state, trace, num_rows), state, "shift")

    return _with_replay(backend, "forgets_conv", replay)


def off_by_one(backend: Backend) -> Backend:
    """Returns `backend` with a commit that replays one row too few, at the right length."""

    def replay(state, trace, num_rows, right):
        short = right(state, trace, jnp.maximum(num_rows - 1, 0))
        return _with_planes(backend, short, right(state, trace, num_rows), "position")

    return _with_replay(backend, "off_by_one", replay)


def clamps(backend: Backend) -> Backend:
    """Returns `backend` with a commit that never keeps fewer than one row."""

    def replay(state, trace, num_rows, right):
        at_least_one = right(state, trace, jnp.maximum(num_rows, 1))
        return _with_planes(backend, at_least_one, right(state, trace, num_rows), "position")

    return _with_replay(backend, "clamps", replay)


class AliasingRuntime(Runtime):
    """A runtime whose captures share the installed state's buffers instead of copying."""

    def _copied(self, source: Any, into: Slot | None) -> Slot:
        del into
        return Slot(state=source.state, identity=self.identity, lengths=source.lengths)


def _with_planes(backend: Backend, state: PyTree, source: PyTree, *kinds: str) -> PyTree:
    """Returns `state` with the planes of these kinds taken from `source`."""
    leaves, others = backend.layout.leaves(state), backend.layout.leaves(source)
    for i in backend.layout.indices(*kinds):
        leaves[i] = others[i]
    return backend.layout.unflatten(leaves)


def _with_replay(backend: Backend, name: str, replay: Callable) -> Backend:
    """Returns a backend like `backend`, whose commit is `replay(..., right)`; `right` is the true one."""
    mode = "fast" if backend.has_fast_verify else "exact"

    def verify(params, state, tokens, num_valid):
        return backend.run_verify(params, state, tokens, num_valid, mode)

    def right(state, trace, num_rows):
        return backend.run_commit(state, trace, num_rows, mode)

    return Backend(
        name=f"{backend.name} that {name}",
        init=backend.functions.init,
        step=backend.functions.step,
        extend=backend.functions.extend,
        extend_last=backend.functions.extend_last,
        verify=verify,
        replay=lambda state, trace, num_rows: replay(state, trace, num_rows, right),
        planes=backend.planes,
    )

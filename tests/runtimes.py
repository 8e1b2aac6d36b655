"""Runtimes for the tests of native state, and interrupts at any line of the code under test."""

import dataclasses
import linecache
import sys

import jax
import jax.numpy as jnp
import numpy as np
from helpers import CAPACITY, cases

import statecore as sc
from statecore import planes as pl

WINDOW = [[4, 5, 6, 7], [1, 2, 3, 4]]


MODES = ["fresh", "lazy", "compact"]


def make(name: str = "digit", model: sc.Model | None = None, *, capacity: int = CAPACITY) -> sc.Runtime:
    case = cases()[name]
    runtime = sc.Runtime(model or sc.load((case.backend, case.params)), batch=2, capacity=capacity)
    runtime.extend([[1, 2, 3], [3, 2, 1]])
    return runtime


def pointers(state: object) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


@jax.jit
def slowly(params: jax.Array) -> jax.Array:
    """Returns something like `params`, after a while."""
    return jax.lax.fori_loop(0, 40, lambda _, product: product @ params, params)


def late_runtime() -> sc.Runtime:
    """A runtime whose step of token 9 fails on the device, after its call has returned: see `busy`."""

    def on_host(tokens):
        if tokens.max() == 9:
            raise ValueError("the device gave up late")
        return np.asarray(tokens)

    def step(params, state, tokens):
        wait = (params[0, 0] * 0).astype(jnp.int32)
        seen = jax.pure_callback(on_host, jax.ShapeDtypeStruct(tokens.shape, tokens.dtype), tokens + wait)
        return {"h": state["h"] * 10 + seen, "pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 10))

    backend = sc.Backend(
        name="late",
        init=lambda params, batch, capacity: {"h": jnp.zeros(batch, jnp.int32), "pos": jnp.zeros(batch, jnp.int32)},
        step=step,
        planes={"h": pl.recurrent(), "pos": pl.position()},
    )
    return sc.Runtime(sc.load((backend, jnp.eye(500))), capacity=8)


def busy(runtime: sc.Runtime) -> None:
    """Gives the runtime parameters that are not ready yet, so that its next call is still to run when it returns."""
    runtime.model = dataclasses.replace(runtime.model, params=slowly(runtime.model.params))


def flat_runtime() -> sc.Runtime:
    """A runtime of a backend without append planes."""

    def step(params, state, tokens):
        return {"h": state["h"] * 10 + tokens, "pos": state["pos"] + 1}, jnp.zeros((tokens.shape[0], 10))

    backend = sc.Backend(
        name="flat",
        init=lambda params, batch, capacity: {"h": jnp.zeros(batch, jnp.int32), "pos": jnp.zeros(batch, jnp.int32)},
        step=step,
        planes={"h": pl.recurrent(), "pos": pl.position()},
    )
    return sc.Runtime(sc.load((backend, None)), capacity=64)


class Interrupt(BaseException):
    pass


def interrupted_at(line: int, call, within: str) -> bool:
    """Runs `call` and raises before the `line`-th line of code in a file `within`; whether it came to it."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if within not in frame.f_code.co_filename:
            return None
        # The interpreter looks for signals nowhere between a block's end and its `__exit__`, but tracing does.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not source.startswith("with "):
            seen += 1
            if seen == line:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False

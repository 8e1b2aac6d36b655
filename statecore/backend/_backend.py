"""`Backend`: pure functions over one model's state, and what is derived from them."""

import dataclasses
from collections.abc import Callable
from numbers import Integral

import jax
import jax.numpy as jnp

from statecore._errors import GeometryError, UnsupportedError
from statecore._identity import Mark
from statecore._pytree import is_traced, unshared
from statecore._typing import PyTree
from statecore.backend import _derive
from statecore.backend._functions import (
    ExtendFn,
    Functions,
    InitFn,
    ReplayFn,
    StepFn,
    VerifyFn,
    keeps_structure,
    step_from_verify,
)
from statecore.state import Geometry, Layout, make_geometry, make_layout


class Origin(Mark):
    """Marks what one backend has made; holds nothing alive."""


class Backend:
    """A bundle of pure functions over one model's state, plus what its planes are.

    Build it once: it owns its compiled functions, and a rebuilt backend compiles anew.

        backend = Backend(init=init, step=step, planes=planes)

    Args:
      init: `init(params, batch, capacity) -> state`.
      step: `step(params, state, tokens[B]) -> (state, logits[B, V])`.
      planes: a tree of `statecore.planes` that mirrors the state; an absent leaf (None)
        of the state is None here too.
      extend: `extend(params, state, tokens[B, T], num_valid[B]) -> (state, logits[B, T, V])`.
        Without it, chunks are scanned steps, bit for bit.
      extend_last: as `extend`, but logits `[B, V]` after each sequence's last token that
        counts, for prompts, of which nobody reads the others. Without it, they are taken
        out of those of `extend`.
      verify: `verify(params, state, tokens[B, K], num_valid[B]) -> (state, logits[B, K, V],
        trace)`; it writes append and sliding planes only. Without it, every step of a
        window is kept.
      replay: `replay(state, trace, num_rows[B]) -> state` advances the other planes over
        the kept rows. Comes with `verify`.
      name: for messages; the name of `init`'s module if not given.

    Raises:
      UnsupportedError: neither `step` nor `verify` with `replay` is given, or only one of
        the two.
      GeometryError: `planes` has a leaf that is no plane, or not exactly one position.
    """

    def __init__(
        self,
        *,
        init: InitFn,
        planes: PyTree,
        step: StepFn | None = None,
        extend: ExtendFn | None = None,
        extend_last: ExtendFn | None = None,
        verify: VerifyFn | None = None,
        replay: ReplayFn | None = None,
        name: str | None = None,
    ):
        if (verify is None) != (replay is None):
            given, missing = ("verify", "replay") if replay is None else ("replay", "verify")
            raise UnsupportedError(
                f"`{given}` was given without `{missing}`: a verify leaves recurrent planes untouched, and "
                "only its replay advances them. Give both, or leave both out and give `step`."
            )
        self.layout: Layout = make_layout(planes)
        if verify is not None and replay is not None:
            verify = keeps_structure(self.layout, "verify", verify)
            replay = keeps_structure(self.layout, "replay", replay)
            step = step_from_verify(verify, replay) if step is None else step
        if step is None:
            raise UnsupportedError("A backend needs `step`, or `verify` and `replay` to derive it from.")
        step = keeps_structure(self.layout, "step", step)
        extend = None if extend is None else keeps_structure(self.layout, "extend", extend)
        extend_last = None if extend_last is None else keeps_structure(self.layout, "extend_last", extend_last)
        self.functions = Functions(init, step, extend, extend_last, verify, replay)
        self.name: str = name or getattr(init, "__module__", "backend").rpartition(".")[2]
        self.origin = Origin()
        self.compiled: dict[tuple, Callable] = {}
        self._vocab_sizes: dict[tuple, int] = {}

    def __repr__(self) -> str:
        given = [name for name in ("step", "extend", "verify") if getattr(self.functions, name)]
        return f"Backend({self.name}: {', '.join(given)}; {len(self.layout.planes)} planes)"

    @property
    def planes(self) -> PyTree:
        """The planes as they were given, mirroring the state."""
        return jax.tree.unflatten(self.layout.treedef, self.layout.planes)

    @property
    def has_fast_verify(self) -> bool:
        """Whether the backend brought its own verify; otherwise only `exact` is possible."""
        return self.functions.verify is not None

    def init(self, params: PyTree, *, batch: int = 1, capacity: int) -> PyTree:
        """Returns an empty state for `batch` sequences of up to `capacity` tokens."""
        _check_sizes(batch, capacity)
        if is_traced(params):
            return self.functions.init(params, batch, capacity)

        def make(params, batch, capacity):
            return strong(self.functions.init(params, batch, capacity))

        state = self.compile(("init",), lambda: jax.jit(make, static_argnums=(1, 2)))(params, batch, capacity)
        state = unshared(state)
        make_geometry(self.name, self.layout, state, batch, capacity)
        return state

    def geometry(self, params: PyTree, *, batch: int = 1, capacity: int) -> Geometry:
        """Returns the geometry of such a state; allocates and computes nothing.

        Raises:
          GeometryError: `planes` does not mirror or does not fit what `init` makes.
        """
        _check_sizes(batch, capacity)
        struct = jax.eval_shape(lambda p: self.functions.init(p, batch, capacity), params)
        geometry = make_geometry(self.name, self.layout, struct, batch, capacity)
        return dataclasses.replace(geometry, trace_nbytes=self._trace_nbytes(params, struct, batch))

    def _trace_nbytes(self, params: PyTree, struct: PyTree, batch: int) -> tuple[int, int] | None:
        """Returns the fixed bytes of a trace and those of each row, from windows of 1 and 2 rows."""
        verify = self.functions.verify
        if verify is None:
            return None

        def trace_bytes(width: int) -> int:
            tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, width), (batch,)))
            trace = jax.eval_shape(verify, params, struct, tokens, counts)[2]
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trace))

        one, two = trace_bytes(1), trace_bytes(2)
        return 2 * one - two, two - one

    def vocab_size(self, params: PyTree, state: PyTree) -> int:
        """Returns `V`, the last axis of the logits, found without running anything."""
        leaves, treedef = jax.tree.flatten((params, state))
        key = (treedef, *[jnp.shape(leaf) for leaf in leaves])
        if key not in self._vocab_sizes:
            lengths = self.layout.lengths(state)
            tokens = jax.ShapeDtypeStruct(lengths.shape, jnp.int32)
            logits = jax.eval_shape(self.functions.step, params, state, tokens)[1]
            self._vocab_sizes[key] = logits.shape[-1]
        return self._vocab_sizes[key]

    def compile(self, key: tuple, build: Callable[[], Callable]) -> Callable:
        """Returns the compiled function under `key`, built on first use and owned here."""
        if key not in self.compiled:
            self.compiled[key] = build()
        return self.compiled[key]

    # The traceable forms: the user's function where there is one, else the derived one.

    def run_step(self, params, state, tokens, live):
        """Takes one token in the rows where `live` `[B]`."""
        return _derive.masked_step(self.layout, self.functions.step, params, state, tokens, live)

    def run_step_alone(self, params, state, tokens, live):
        """Takes one token of each sequence, all of them `live`, with the bits of a step under its own jit."""
        return _derive.step_alone(self.functions.step, params, state, tokens, live)

    def run_extend(self, params, state, tokens, num_valid):
        """Takes a chunk; see `ExtendFn`. A chunk of no tokens is not the user's to handle."""
        if self.functions.extend is not None and tokens.shape[1]:
            return self.functions.extend(params, state, tokens, num_valid)
        return _derive.extend(self.layout, self.functions.step, params, state, tokens, num_valid)

    def run_verify(self, params, state, tokens, num_valid, mode):
        """Reads a window; see `VerifyFn`. `exact` scans steps and keeps each."""
        if mode == "fast":
            assert self.functions.verify is not None  # the mode was checked at the door
            return self.functions.verify(params, state, tokens, num_valid)
        return _derive.verify(self.layout, self.functions.step, params, state, tokens, num_valid)

    def run_commit(self, state, trace, num_rows, mode):
        """Advances a verified state over the kept rows."""
        if mode == "fast":
            assert self.functions.replay is not None
            return self.functions.replay(state, trace, num_rows)
        return _derive.select(self.layout, state, trace, num_rows)


def strong(tree: PyTree) -> PyTree:
    """Returns arrays without weak types, which would compile a transition once more."""
    return jax.tree.map(
        lambda leaf: leaf if not leaf.weak_type else jax.lax.convert_element_type(leaf, leaf.dtype), tree
    )


def _check_sizes(batch: int, capacity: int) -> None:
    if not isinstance(batch, Integral) or not isinstance(capacity, Integral):
        raise GeometryError(f"batch and capacity must be whole numbers, but are {batch!r} and {capacity!r}.")
    if batch < 1 or capacity < 1:
        raise GeometryError(f"A state needs batch >= 1 and capacity >= 1, but got {batch} and {capacity}.")

"""Our side of `bench/decode.py`: a loaded model, a warm state, the cases to time, and the products they are made of."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import statecore as sc
from bench.harness import Case
from statecore._typing import PyTree

NUM_PREFIX = 64
NUM_WINDOW = 8
NUM_PROMPT = 512
# Room for the prompt and as much again as a step starts from; what is empty of it is paid for at each step.
CAPACITY = NUM_PREFIX + NUM_PROMPT

# Taps of a convolution are matrices too, but nothing is multiplied by them.
_LEAST_SIDE = 16


@dataclasses.dataclass(frozen=True)
class Texts:
    """Random tokens: the prefix of the warm state, the window after it, and the prompt."""

    prefix: list[int]
    window: list[int]
    prompt: list[int]


def make_texts(vocab_size: int, *, seed: int = 0) -> Texts:
    """Returns tokens below `vocab_size`."""
    rng = np.random.default_rng(seed)
    return Texts(*(rng.integers(vocab_size, size=size).tolist() for size in (NUM_PREFIX, NUM_WINDOW, NUM_PROMPT)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bed:
    """One model and its state after the prefix; each call of a case gets a copy of that state, which it consumes."""

    model: sc.Model
    texts: Texts
    state: PyTree

    def step(self) -> Case:
        """Returns one token onto the warm state."""
        token = np.array(self.texts.window[:1], np.int32)
        return self._warm_case(f"sc.step, {NUM_PREFIX} of {CAPACITY} rows", sc.step, token)

    def extend(self) -> Case:
        """Returns the window onto the warm state."""
        return self._warm_case(f"sc.extend of {NUM_WINDOW}", sc.extend, np.array([self.texts.window], np.int32))

    def verify(self) -> Case:
        """Returns a verify of the window."""
        call = functools.partial(sc.verify, mode="fast")
        return self._warm_case(f"sc.verify of {NUM_WINDOW}", call, np.array([self.texts.window], np.int32))

    def prefill(self) -> Case:
        """Returns the prompt into an empty state, and the logits of its last token."""
        backend, params = self.model.backend, self.model.params
        return Case(
            what=f"sc.extend of {NUM_PROMPT}, last logits",
            call=lambda state: sc.extend(
                backend, params, state, np.array([self.texts.prompt], np.int32), logits="last", donate=True
            ),
            setup=lambda: backend.init(params, batch=1, capacity=CAPACITY),
        )

    def products(self, num_rows: int) -> Case:
        """Returns the chain of all matrix products of the model, with `num_rows` rows."""
        x = jnp.ones((1, num_rows, self.model.params["embed"].shape[1]))
        chain, params = jax.jit(multiply_all), self.model.params
        what = "its matrix-vector products" if num_rows == 1 else f"its matrix products, {num_rows} rows"
        return Case(what=what, call=lambda: chain(params, x))

    def _warm_case(self, what: str, transition: Callable, tokens: np.ndarray) -> Case:
        backend, params = self.model.backend, self.model.params
        return Case(
            what=what,
            call=lambda state: leaves(transition(backend, params, state, tokens, donate=True)),
            setup=lambda: sc.capture(self.state),
        )


def leaves(result: Any) -> Any:
    """Returns the arrays of a result: a window is awaited by its parts."""
    return (result.state, result.logits, result.trace) if isinstance(result, sc.Window) else result


def load_bed(folder: Path, texts: Texts) -> Bed:
    """Returns the model of a folder, and its state after the prefix."""
    model = sc.load(folder, progress=False)
    state = model.backend.init(model.params, batch=1, capacity=CAPACITY)
    state, _ = sc.extend(model.backend, model.params, state, [texts.prefix], logits="none", donate=True)
    return Bed(model=model, texts=texts, state=state)


def multiply_all(params: PyTree, x: jax.Array) -> jax.Array:
    """Returns `x` `[1, M, D]` sent through every matrix of the model, the head last, each laid out as it is there."""
    for leaf in jax.tree.leaves(params["layers"]):
        if is_factor(leaf):
            x = _fit(x, leaf.shape[0]) @ leaf
    x = _fit(x, params["embed"].shape[1])
    if "head" in params:
        return jnp.matmul(x, params["head"], preferred_element_type=jnp.float32)
    return jnp.einsum("btd,vd->btv", x, params["embed"], preferred_element_type=jnp.float32)


def is_factor(leaf: jax.Array) -> bool:
    """Whether a parameter is a matrix that vectors are multiplied by."""
    return leaf.ndim == 2 and min(leaf.shape) >= _LEAST_SIDE


def _fit(x: jax.Array, width: int) -> jax.Array:
    """Returns `x` `[..., F]` as `[..., width]`: repeated, then folded, so that every column is used."""
    repeats = -(-width // x.shape[-1])
    x = jnp.concatenate([x] * repeats, axis=-1)
    num_folds = -(-x.shape[-1] // width)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, num_folds * width - x.shape[-1])])
    return x.reshape(*x.shape[:-1], num_folds, width).sum(-2)

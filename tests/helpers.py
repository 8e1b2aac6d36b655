"""The backends that every law is tested on, and states of them to start from."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import statecore as sc
from statecore import testing

CAPACITY = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """A backend under test.

    tolerance: of its own extend and fast verify; None means bit for bit.
    """

    name: str
    backend: sc.Backend
    params: object
    vocab_size: int
    tolerance: float | None = None

    def state(self, *, batch: int = 2, length: int = 0, seed: int = 0) -> object:
        """Returns a state of `batch` sequences that were fed `length` tokens each."""
        state = self.backend.init(self.params, batch=batch, capacity=CAPACITY)
        tokens = np.random.default_rng(seed).integers(0, self.vocab_size, (batch, 12))
        return sc.extend(self.backend, self.params, state, tokens, num_valid=length)[0]

    @property
    def modes(self) -> list[str]:
        return ["exact", "fast"] if self.backend.has_fast_verify else ["exact"]

    def mode_tolerance(self, mode: str) -> float | None:
        return self.tolerance if mode == "fast" else None


@functools.cache
def cases() -> dict[str, Case]:
    """Returns the toys by name, built once: a rebuilt backend compiles anew."""
    params = testing.decay_params()
    made = [
        Case("digit", testing.digit_backend(), None, 10),
        Case("digit-own", testing.digit_backend(own_verify=True), None, 10),
        Case("decay", testing.decay_backend(), params, 16),
        Case("decay-own", testing.decay_backend(own_verify=True), params, 16, 1e-5),
    ]
    return {case.name: case for case in made}


CASE_NAMES = ["digit", "digit-own", "decay", "decay-own"]


def host(tree: object) -> object:
    """Returns a host copy that shares nothing with the device."""
    return jax.tree.map(np.array, tree)


def assert_bits(before: object, tree: object) -> None:
    """Asserts that `tree` still holds the bits of the host copy `before`."""
    for old, leaf in zip(jax.tree.leaves(before), jax.tree.leaves(tree), strict=True):
        assert np.array(leaf).tobytes() == old.tobytes()


def poisoned(state: object) -> object:
    """Returns a state of the same geometry full of NaN, or of absurd integers."""

    def poison(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.full_like(leaf, jnp.nan)
        return jnp.full_like(leaf, -(2**30) - 7)

    return jax.tree.map(poison, state)


def refuses(error: type[Exception], call: Callable[[], object], state: object, *words: str) -> None:
    """Asserts that `call` raises `error`, that its message holds `words`, and that `state` is as it was."""
    before = host(state)
    try:
        call()
    except error as refusal:
        for word in words:
            assert word in str(refusal), f"{word!r} not in {refusal}"
    else:
        raise AssertionError(f"{error.__name__} was not raised")
    assert_bits(before, state)

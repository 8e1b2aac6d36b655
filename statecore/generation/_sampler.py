"""Choosing the next token, as a pure function of logits and a key."""

import dataclasses
import math
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import UnsupportedError

# Logits divided by less than this may overflow float32.
_LEAST_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """How a token is chosen from its logits.

    temperature: 0 takes the most likely token and draws nothing.
    top_k: keep the `top_k` most likely tokens; None keeps all.
    top_p: keep the most likely tokens whose probabilities reach `top_p` (arXiv
      1904.09751); 1 keeps all.
    min_p: drop tokens less likely than `min_p` times the most likely one; 0 drops none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def check_sampler(sampler: Sampler) -> None:
    """Raises UnsupportedError for a setting that means nothing."""
    faults = []
    if not (math.isfinite(sampler.temperature) and sampler.temperature >= 0):
        faults.append(f"temperature is {sampler.temperature}, but must be finite and at least 0")
    elif sampler.temperature > 0 and np.float32(sampler.temperature) < _LEAST_TEMPERATURE:
        faults.append(f"temperature is {sampler.temperature}, too small to divide by; 0 is greedy")
    if sampler.top_k is not None and not (isinstance(sampler.top_k, Integral) and sampler.top_k >= 1):
        faults.append(f"top_k is {sampler.top_k}, but must be a whole number of at least 1, or None")
    if not 0 < sampler.top_p <= 1:
        faults.append(f"top_p is {sampler.top_p}, but must be above 0 and at most 1")
    if not 0 <= sampler.min_p <= 1:
        faults.append(f"min_p is {sampler.min_p}, but must lie between 0 and 1")
    if faults:
        raise UnsupportedError("The sampler cannot be used: " + "; ".join(faults) + ".")


def choose(sampler: Sampler, key: jax.Array, indices: jax.Array | np.ndarray, logits: jax.Array) -> jax.Array:
    """Returns the tokens `[B, K]` that follow `logits` `[B, K, V]`.

    The draw for output `i` of a sequence depends on the key, the sequence and `i` alone,
    never on how many outputs were drawn together. So a restored run repeats itself, and
    a speculative run accepts a draft exactly when plain sampling would have drawn it.

    Args:
      sampler: the settings.
      key: of the run; it is folded, never consumed.
      indices: `[B, K]`, the index of each output in its sequence.
      logits: `[B, K, V]`.
    """
    if sampler.is_greedy:
        return _most_likely(logits)
    top_k = logits.shape[-1] if sampler.top_k is None else sampler.top_k
    settings = (sampler.temperature, float(top_k), sampler.top_p, sampler.min_p)
    return _draw(key, jnp.asarray(indices), logits, jnp.array(settings, jnp.float32))


@jax.jit
def _most_likely(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def _draw(key: jax.Array, indices: jax.Array, logits: jax.Array, settings: jax.Array) -> jax.Array:
    def draw(row, index, logits):
        row_key = jax.random.fold_in(jax.random.fold_in(key, row), index)
        return jax.random.categorical(row_key, _kept(logits, settings)).astype(jnp.int32)

    rows = jnp.arange(logits.shape[0])
    along_window = jax.vmap(draw, in_axes=(None, 0, 0))
    return jax.vmap(along_window)(rows, indices, logits)


def _kept(logits: jax.Array, settings: jax.Array) -> jax.Array:
    """Returns tempered logits `[V]`, minus infinity for what the settings drop."""
    temperature, top_k, top_p, min_p = settings
    scaled = logits.astype(jnp.float32) / temperature
    order = jnp.argsort(-scaled, stable=True)
    probabilities = jax.nn.softmax(scaled[order])
    before = jnp.cumsum(probabilities) - probabilities
    rank = jnp.arange(logits.shape[-1], dtype=jnp.float32)
    kept = (rank < top_k) & (before < top_p) & (probabilities >= min_p * probabilities[0])
    return jnp.where(jnp.zeros_like(kept).at[order].set(kept), scaled, -jnp.inf)


def key_of(seed: int | jax.Array) -> jax.Array:
    """Returns the key of a run with this seed, or the key itself.

    Raises:
      UnsupportedError: the seed is neither a whole number of 64 bits nor one typed key.
    """
    if isinstance(seed, Integral) and -(2**63) <= int(seed) < 2**63:
        return jax.random.key(int(seed))
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0:
        return seed
    raise UnsupportedError(f"seed must be a whole number of 64 bits or one typed key, but is {seed!r}.")

"""The settings of a sampler, and the choice that needs no state: logits and a key."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import UnsupportedError

# Logits divided by less than this may overflow float32.
_LEAST_TEMPERATURE = 1e-30
# What is beyond it is infinite once it is a setting.
_MOST_FLOAT = float(np.finfo(np.float32).max)
# Beyond these a logit could leave float32, or a penalty be a ban; bans are what constraints are for.
_MOST_REPETITION = 100.0
_MOST_PENALTY = 2.0
_MOST_BIAS = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirostat:
    """Keeps the surprise of the output near a target (Mirostat v2, arXiv 2007.14966).

    A token is kept if its surprise is at most `mu`, and the likeliest always is. After
    each draw `mu` falls by `eta` times what the surprise exceeded `tau`. Surprise is in
    bits, of the drawn token among the tokens that were kept.

    tau: the surprise to hold, in bits; above 0.
    eta: how fast `mu` follows; above 0.
    """

    tau: float = 5.0
    eta: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """How a token is chosen from its logits.

    Logits are penalised, biased, masked by a constraint, divided by the temperature and
    cut, in this order. Greedy choice takes penalties, bias and mask into account too.

    temperature: 0 takes the most likely token and draws nothing.
    top_k: keep the `top_k` most likely tokens; None keeps all.
    top_p: keep the most likely tokens whose probabilities reach `top_p` (arXiv
      1904.09751); 1 keeps all.
    min_p: drop tokens less likely than `min_p` times the most likely one; 0 drops none.
    repetition_penalty: divides the positive logits, and multiplies the negative ones, of
      tokens that stand in the prompt or the output (CTRL, arXiv 1909.05858); 1 is none.
    presence_penalty: taken once from the logits of tokens that stand in the output; the
      prompt does not count. Between -2 and 2.
    frequency_penalty: taken from a logit for each time its token stands in the output;
      the prompt does not count. Between -2 and 2.
    logit_bias: added to the logits of these tokens, between -100 and 100; a mapping,
      stored as sorted pairs so that a sampler is hashable.
    mirostat: holds the surprise of the output; it cuts what `top_k`, `top_p` and `min_p` left.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    mirostat: Mirostat | None = None

    def __post_init__(self):
        # Keys that are no numbers cannot be sorted with others; they are refused by `check_sampler`.
        if isinstance(self.logit_bias, Mapping):
            tokens = [isinstance(token, Integral) for token in self.logit_bias]
            pairs = sorted(self.logit_bias.items()) if all(tokens) else self.logit_bias.items()
            object.__setattr__(self, "logit_bias", tuple(pairs))

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def uses_penalties(self) -> bool:
        """Whether the tokens so far matter, so that they must be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def needs_state(self) -> bool:
        """Whether more is needed than logits and a key: token counts, or Mirostat's `mu`."""
        return self.uses_penalties or self.mirostat is not None


def check_sampler(sampler: Sampler, vocab_size: int | None = None) -> None:
    """Raises UnsupportedError, naming every fault, for settings that mean nothing.

    Args:
      sampler: the settings.
      vocab_size: tokens of the model, against which `logit_bias` is checked; None if unknown.
    """
    faults = [
        *_temperature_faults(sampler),
        *_cut_faults(sampler),
        *_penalty_faults(sampler),
        *_bias_faults(sampler.logit_bias, vocab_size),
        *_mirostat_faults(sampler),
    ]
    if faults:
        raise UnsupportedError("The sampler cannot be used: " + "; ".join(faults) + ".")


def _is_within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and least <= _as_float(value) <= most


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    """Returns `value` as a message shows it, which Python refuses for a very long number."""
    is_long = isinstance(value, int) and value.bit_length() > 64
    return f"a number of {value.bit_length()} bits" if is_long else repr(value)


def is_finite(value: object) -> bool:
    """Returns whether `value` is a number, and neither infinite nor NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(_as_float(value))


def _temperature_faults(sampler: Sampler) -> list[str]:
    temperature = sampler.temperature
    if not _is_within(temperature, 0, _MOST_FLOAT):
        return [f"temperature is {_shown(temperature)}, but must be finite in float32 and at least 0"]
    if 0 < temperature and np.float32(temperature) < _LEAST_TEMPERATURE:
        return [f"temperature is {temperature}, too small to divide by; 0 is greedy"]
    return []


def _cut_faults(sampler: Sampler) -> list[str]:
    faults, top_k = [], sampler.top_k
    is_whole = isinstance(top_k, Integral) and not isinstance(top_k, bool)
    if top_k is not None and not (is_whole and _is_within(int(top_k), 1, math.inf)):
        faults.append(f"top_k is {_shown(top_k)}, but must be a whole number of at least 1, or None")
    if not _is_within(sampler.top_p, 0, 1) or sampler.top_p == 0:
        faults.append(f"top_p is {_shown(sampler.top_p)}, but must be above 0 and at most 1")
    if not _is_within(sampler.min_p, 0, 1):
        faults.append(f"min_p is {_shown(sampler.min_p)}, but must lie between 0 and 1")
    return faults


def _penalty_faults(sampler: Sampler) -> list[str]:
    faults = []
    least, most = 1 / _MOST_REPETITION, _MOST_REPETITION
    if not _is_within(sampler.repetition_penalty, least, most):
        faults.append(
            f"repetition_penalty is {_shown(sampler.repetition_penalty)}, but must lie between {least} and {most}; "
            "1 is none"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampler, name)
        if not _is_within(value, -_MOST_PENALTY, _MOST_PENALTY):
            faults.append(f"{name} is {_shown(value)}, but must lie between {-_MOST_PENALTY} and {_MOST_PENALTY}")
    return faults


def _bias_faults(pairs: Any, vocab_size: int | None) -> list[str]:
    if not (isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)):
        return [f"logit_bias is {pairs!r}, but must map tokens to numbers"]
    faults = []
    for token, bias in pairs:
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            faults.append(f"logit_bias names token {token!r}, which is not a whole number of at least 0")
        elif vocab_size is not None and int(token) >= vocab_size:
            faults.append(f"logit_bias names token {token}, but the vocabulary has {vocab_size}")
        if not _is_within(bias, -_MOST_BIAS, _MOST_BIAS):
            faults.append(
                f"logit_bias of token {token} is {_shown(bias)}, but must lie between {-_MOST_BIAS} and "
                f"{_MOST_BIAS}; use a constraint to forbid a token"
            )
    tokens = [token for token, _ in pairs if isinstance(token, Integral)]
    if len(set(tokens)) < len(tokens):
        faults.append("logit_bias names a token twice")
    return faults


def _mirostat_faults(sampler: Sampler) -> list[str]:
    mirostat = sampler.mirostat
    if mirostat is None:
        return []
    if not isinstance(mirostat, Mirostat):
        return [f"mirostat is {mirostat!r}, but must be a Mirostat, or None"]
    faults = []
    if sampler.temperature == 0:
        faults.append("mirostat needs a draw, but temperature 0 is greedy; use a temperature above 0")
    for name in ("tau", "eta"):
        value = getattr(mirostat, name)
        if not (_is_within(value, 0, _MOST_FLOAT / 2) and value > 0):  # its `mu` begins at twice `tau`
            faults.append(f"{name} of mirostat is {_shown(value)}, but must be finite in float32 and above 0")
    return faults


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

    Raises:
      UnsupportedError: the sampler counts tokens, biases logits or uses Mirostat: use `draw`.
    """
    if sampler.needs_state or sampler.logit_bias:
        raise UnsupportedError("This sampler has penalties, a bias or Mirostat, which `choose` leaves out. Use `draw`.")
    if sampler.is_greedy:
        return _most_likely(logits)
    return _draw(key, jnp.asarray(indices), logits, cut_settings(sampler, logits.shape[-1]))


def cut_settings(sampler: Sampler, vocab_size: int) -> np.ndarray:
    """Returns temperature, top_k, top_p and min_p as float32 `[4]`: data, so that none recompiles."""
    top_k = vocab_size if sampler.top_k is None else min(sampler.top_k, vocab_size)
    return np.array((sampler.temperature, float(top_k), sampler.top_p, sampler.min_p), np.float32)


@jax.jit
def _most_likely(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def _draw(key: jax.Array, indices: jax.Array, logits: jax.Array, settings: jax.Array) -> jax.Array:
    def draw(row, index, logits):
        row_key = jax.random.fold_in(jax.random.fold_in(key, row), index)
        return jax.random.categorical(row_key, kept_logits(logits, settings)).astype(jnp.int32)

    rows = jnp.arange(logits.shape[0])
    along_window = jax.vmap(draw, in_axes=(None, 0, 0))
    return jax.vmap(along_window)(rows, indices, logits)


def kept_logits(logits: jax.Array, settings: jax.Array, mu: jax.Array | None = None) -> jax.Array:
    """Returns tempered logits `[V]`, minus infinity for what the settings drop.

    Args:
      logits: `[V]`.
      settings: float32 `[4]`, from `cut_settings`.
      mu: the most surprise in bits of a token that Mirostat keeps; None without Mirostat.
    """
    temperature, top_k, top_p, min_p = settings
    scaled = logits.astype(jnp.float32) / temperature
    order = jnp.argsort(-scaled, stable=True)
    probabilities = jax.nn.softmax(scaled[order])
    before = jnp.cumsum(probabilities) - probabilities
    rank = jnp.arange(logits.shape[-1], dtype=jnp.float32)
    kept = (rank < top_k) & (before < top_p) & (probabilities >= min_p * probabilities[0])
    if mu is not None:
        kept &= (-jnp.log2(probabilities) <= mu) | (rank == 0)
    return jnp.where(jnp.zeros_like(kept).at[order].set(kept), scaled, -jnp.inf)


def key_of(seed: int | jax.Array) -> jax.Array:
    """Returns the key of a run with this seed, or the key itself.

    Raises:
      UnsupportedError: the seed is neither a whole number of 64 bits nor one typed key.
    """
    if isinstance(seed, Integral) and not isinstance(seed, bool) and -(2**63) <= int(seed) < 2**63:
        return jax.random.key(int(seed))
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0:
        return seed
    raise UnsupportedError(f"seed must be a whole number of 64 bits or one typed key, but is {seed!r}.")

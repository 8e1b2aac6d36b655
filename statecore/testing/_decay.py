"""The decay model: `h' = a h + x w` in float32, so that rounding order shows in the bits.

Its planes are stacked over two layers, with the batch on axis 1. The first channel has
`a = 0.5` and `w = 1`; the others decay at rates whose products are never exact.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.state import planes as pl

NUM_LAYERS = 2
NUM_CHANNELS = 5
VOCAB_SIZE = 16


def decay_params() -> PyTree:
    """Returns the model's parameters: decays, input weights `[L, N]` and a read-out `[N, V]`."""
    channels = jnp.arange(NUM_LAYERS * NUM_CHANNELS, dtype=jnp.float32).reshape(NUM_LAYERS, -1)
    readout = jnp.sin(jnp.arange(NUM_CHANNELS * VOCAB_SIZE, dtype=jnp.float32) * 1.7)
    return {
        "decay": 0.5 + 0.49 * jnp.sin(channels * 0.9) ** 2,
        "weight": jnp.cos(channels * 0.7),
        "readout": readout.reshape(NUM_CHANNELS, VOCAB_SIZE),
    }


def decay_backend(*, own_verify: bool = False) -> Backend:
    """Returns the decay model; its parameters are `decay_params()`.

    Args:
      own_verify: bring `verify` and `replay`, equal to decoding up to rounding, instead
        of leaving them to be derived from `step`, bit for bit.
    """

    def init(params, batch, capacity):
        del params
        return {
            "h": jnp.zeros((NUM_LAYERS, batch, NUM_CHANNELS), jnp.float32),
            "history": jnp.zeros((batch, capacity), jnp.int32),
            "scale": jnp.full((batch,), 3.0, jnp.float32),
            "pos": jnp.zeros(batch, jnp.int32),
        }

    own = {"verify": _verify, "replay": _replay} if own_verify else {}
    return Backend(
        name="decay",
        init=init,
        step=_step,
        planes={
            "h": pl.recurrent(batch_axis=1),
            "history": pl.append(axis=1),
            "scale": pl.constant(),
            "pos": pl.position(),
        },
        **own,
    )


def decay_oracle(history: Sequence[int]) -> np.ndarray:
    """Returns `h` `[L, N]` in float64 after `history`; a float32 state agrees to about 1e-6."""
    params = jax.tree.map(lambda leaf: np.array(leaf, np.float64), decay_params())
    h = np.zeros((NUM_LAYERS, NUM_CHANNELS))
    for token in history:
        h = h * params["decay"] + token * params["weight"]
    return h


def _advance(h, decay, weight, token, keep):
    """Returns `h` `[L, B, N]` after `token` `[B]` in the rows where `keep` `[B]`."""
    update = token.astype(jnp.float32)[None, :, None] * weight[:, None]
    return jnp.where(keep[None, :, None], h * decay[:, None] + update, h)


def _append(history, tokens, rows):
    return history.at[jnp.arange(history.shape[0])[:, None], rows].set(tokens, mode="drop")


def _logits(params, state, h):
    return jnp.tanh(h.sum(0)) @ params["readout"] * state["scale"][:, None]


def _step(params, state, tokens):
    position = state["pos"]
    every_row = jnp.ones_like(tokens, bool)
    h = _advance(state["h"], params["decay"], params["weight"], tokens, every_row)
    history = _append(state["history"], tokens[:, None], position[:, None])
    return state | {"h": h, "history": history, "pos": position + 1}, _logits(params, state, h)


def _verify(params, state, tokens, num_valid):
    offsets = jnp.arange(tokens.shape[1])
    rows = jnp.where(offsets < num_valid[:, None], state["pos"][:, None] + offsets, state["history"].shape[1])
    h, logits = state["h"], []
    for row in range(tokens.shape[1]):
        h = _advance(h, params["decay"], params["weight"], tokens[:, row], row < num_valid)
        logits.append(_logits(params, state, h))
    new = state | {"history": _append(state["history"], tokens, rows)}
    trace = {"tokens": tokens, "decay": params["decay"], "weight": params["weight"]}
    return new, jnp.stack(logits, axis=1), trace


def _replay(state, trace, num_rows):
    h, tokens = state["h"], trace["tokens"]
    for row in range(tokens.shape[1]):
        h = _advance(h, trace["decay"], trace["weight"], tokens[:, row], row < num_rows)
    return state | {"h": h, "pos": state["pos"] + num_rows}

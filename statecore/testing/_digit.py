"""The digit model: a state that spells what it was fed.

`h' = 10 h + x` over int32, a shift plane with the last three inputs, an append plane and
a ring with all of them. Prompt [1, 2, 3] gives h = 123; a rollback that forgot, repeated
or dropped a row shows which in the digits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.state import planes as pl

NUM_TAPS = 3
WINDOW = 4
RING_ROWS = 12
VOCAB_SIZE = 10


def digit_backend(*, own_verify: bool = False, ring_rows: int = RING_ROWS) -> Backend:
    """Returns the digit model; parameters are None.

    Args:
      own_verify: bring `extend`, `verify` and `replay` instead of leaving them to be
        derived from `step`.
      ring_rows: rows `R` of the ring; a window may have `R - 3` rows.
    """

    def init(params, batch, capacity):
        del params
        return {
            "h": jnp.zeros(batch, jnp.int32),
            "conv": jnp.zeros((batch, NUM_TAPS), jnp.int32),
            "kv": jnp.zeros((batch, capacity), jnp.int32),
            "ring": jnp.zeros((batch, ring_rows), jnp.int32),
            "absent": None,
            "pos": jnp.zeros(batch, jnp.int32),
        }

    own = {"extend": _extend, "verify": _verify, "replay": _replay} if own_verify else {}
    return Backend(
        name="digit",
        init=init,
        step=_step,
        planes={
            "h": pl.recurrent(),
            "conv": pl.shift(axis=1),
            "kv": pl.append(axis=1),
            "ring": pl.sliding(axis=1, size=WINDOW),
            "absent": None,
            "pos": pl.position(),
        },
        **own,
    )


def digit_oracle(histories: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    """Returns what a state that was fed these histories must hold, computed with NumPy."""
    return [
        {
            "h": np.uint32(int("".join(map(str, history)) or "0") % 2**32).astype(np.int32),  # wraps past 9 digits
            "conv": np.array(([0] * NUM_TAPS + list(history))[-NUM_TAPS:], np.int32),
            "kv": np.array(history, np.int32),
            "ring": np.array(list(history)[-(WINDOW - 1) :], np.int32),
            "pos": np.int32(len(history)),
        }
        for history in histories
    ]


def digit_rows(state: PyTree) -> list[dict[str, object]]:
    """Returns what can be read of a digit state, a dict a sequence, as `digit_oracle` has it."""
    state = {name: np.array(leaf) for name, leaf in state.items() if leaf is not None}
    rows = []
    for row, length in enumerate(state["pos"]):
        seen = np.arange(max(0, length - WINDOW + 1), length) % state["ring"].shape[1]
        rows.append(
            {
                "h": state["h"][row],
                "conv": state["conv"][row],
                "kv": state["kv"][row, :length],
                "ring": state["ring"][row, seen],
                "pos": length,
            }
        )
    return rows


def _logits(h, conv, kv_sum, ring_sum):
    """Scores the digits around a target that every plane has a part in."""
    target = (h * 7 + conv[..., 0] * 3 + kv_sum + ring_sum * 5) % VOCAB_SIZE
    return -jnp.abs(jnp.arange(VOCAB_SIZE) - target[..., None]).astype(jnp.float32)


def _sums(state, last):
    """Returns the sums of the append rows and of the window's ring rows up to `last` `[B]`."""
    positions = jnp.arange(state["kv"].shape[1])
    kv_sum = jnp.where(positions <= last[:, None], state["kv"], 0).sum(1, dtype=jnp.int32)
    back = last[:, None] - jnp.arange(WINDOW)
    seen = jnp.take_along_axis(state["ring"], back % state["ring"].shape[1], axis=1)
    return kv_sum, jnp.where(back >= 0, seen, 0).sum(1, dtype=jnp.int32)


def _write(state, tokens, positions, valid):
    """Writes `tokens` `[B, T]` at `positions` where `valid`; of a chunk that laps the ring, the last rows."""
    batch = jnp.arange(tokens.shape[0])[:, None]
    capacity, size = state["kv"].shape[1], state["ring"].shape[1]
    newest = jnp.max(jnp.where(valid, positions, -1), axis=1, keepdims=True)
    kept = valid & (positions > newest - size)
    kv = state["kv"].at[batch, jnp.where(valid, positions, capacity)].set(tokens, mode="drop")
    ring = state["ring"].at[batch, jnp.where(kept, positions % size, size)].set(tokens, mode="drop")
    return state | {"kv": kv, "ring": ring}


def _step(params, state, tokens):
    del params
    position = state["pos"]
    state = _write(state, tokens[:, None], position[:, None], jnp.ones_like(tokens, bool)[:, None])
    h = state["h"] * 10 + tokens
    conv = jnp.concatenate([state["conv"][:, 1:], tokens[:, None]], axis=1)
    logits = _logits(h, conv, *_sums(state, position))
    return state | {"h": h, "conv": conv, "pos": position + 1}, logits


def _spelled(h, tokens, num_rows):
    for row in range(tokens.shape[1]):
        h = jnp.where(row < num_rows, h * 10 + tokens[:, row], h)
    return h


def _verify(params, state, tokens, num_valid):
    del params
    offsets = jnp.arange(tokens.shape[1])
    positions = state["pos"][:, None] + offsets
    new = _write(state, tokens, positions, offsets < num_valid[:, None])
    inputs = jnp.concatenate([state["conv"], tokens], axis=1)
    rows = [
        _logits(
            _spelled(state["h"], tokens, jnp.full_like(num_valid, row + 1)),
            inputs[:, row + 1 : row + 1 + NUM_TAPS],
            *_sums(new, positions[:, row]),
        )
        for row in range(tokens.shape[1])
    ]
    return new, jnp.stack(rows, axis=1), {"tokens": tokens}


def _replay(state, trace, num_rows):
    tokens = trace["tokens"]
    inputs = jnp.concatenate([state["conv"], tokens], axis=1)
    taps = num_rows[:, None] + jnp.arange(NUM_TAPS)
    return state | {
        "h": _spelled(state["h"], tokens, num_rows),
        "conv": jnp.take_along_axis(inputs, taps, axis=1),
        "pos": state["pos"] + num_rows,
    }


def _extend(params, state, tokens, num_valid):
    def row(state, inputs):
        index, token = inputs
        live = (index < num_valid).astype(jnp.int32)
        state, logits, trace = _verify(params, state, token[:, None], live)
        return _replay(state, trace, live), logits[:, 0]

    state, logits = jax.lax.scan(row, state, (jnp.arange(tokens.shape[1]), tokens.T))
    return state, jnp.moveaxis(logits, 0, 1)

"""Sequences of the toys for the tests of `statecore.ssm`, and the backends they lack."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, cases

import statecore as sc
from statecore import planes as pl
from statecore import ssm, testing

STRATEGIES = [
    ("digit", "select"),
    ("digit", "rerun"),
    ("digit-own", "replay"),
    ("digit-own", "select"),
    ("digit-own", "rerun"),
    ("decay", "select"),
    ("decay", "rerun"),
    ("decay-own", "replay"),
]
by_strategy = pytest.mark.parametrize(("name", "strategy"), STRATEGIES)
PROMPT = [[1, 2, 3], [3, 2, 1]]
WINDOW = [[4, 5, 6, 7], [1, 2, 3, 4]]


def start(name="digit", strategy="auto", *, ring_slots=4, prompt=PROMPT):
    case = cases()[name]
    state = case.backend.init(case.params, batch=len(prompt), capacity=CAPACITY)
    seq = ssm.begin(case.backend, state, ring_slots=ring_slots, strategy=strategy)
    return ssm.extend(case.params, seq, prompt)[0]


def stepped(name, tokens):
    """The state that single steps give, sequence by sequence of equal length or not."""
    case = cases()[name]
    longest = max(map(len, tokens))
    padded = np.array([row + [0] * (longest - len(row)) for row in tokens])
    empty = case.backend.init(case.params, batch=len(tokens), capacity=CAPACITY)
    states = testing.raw_states(case.backend, case.params, empty, padded)
    return testing.pick_rows(case.backend, states, [len(row) for row in tokens])


def same(name, seq, tokens):
    case = cases()[name]
    assert [row.tolist() for row in seq.tokens] == tokens
    assert seq.lengths.tolist() == np.array(case.backend.layout.lengths(seq.state)).tolist()
    tolerance = 1e-5 if seq.strategy == "replay" else None
    testing.assert_same(
        case.backend, seq.state, stepped(name, tokens), law="ssm", case=str(tokens), tolerance=tolerance
    )


def opaque_backend():
    return sc.Backend(
        name="opaque",
        init=lambda params, batch, capacity: {"seen": jnp.zeros(batch, jnp.int32), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, state, tokens: (
            {"seen": state["seen"] * 3 + tokens, "pos": state["pos"] + 1},
            jnp.zeros((tokens.shape[0], 10)),
        ),
        planes={"seen": pl.opaque(), "pos": pl.position()},
    )


def attention_backend():
    return sc.Backend(
        name="attention",
        init=lambda params, batch, capacity: {
            "kv": jnp.zeros((batch, capacity), jnp.int32),
            "pos": jnp.zeros(batch, jnp.int32),
        },
        step=lambda params, state, tokens: (
            {
                "kv": state["kv"].at[jnp.arange(tokens.shape[0]), state["pos"]].set(tokens, mode="drop"),
                "pos": state["pos"] + 1,
            },
            jnp.zeros((tokens.shape[0], 10)),
        ),
        planes={"kv": pl.append(axis=1), "pos": pl.position()},
    )


def begun(backend, *, ring_slots=0, prompt=(1, 2, 3)):
    seq = ssm.begin(backend, backend.init(None, capacity=CAPACITY), ring_slots=ring_slots)
    return ssm.extend(None, seq, [list(prompt)])[0]


def cached(name="digit", **options):
    case = cases()[name]
    return sc.PrefixCache(case.backend, case.params, capacity=CAPACITY, **options)

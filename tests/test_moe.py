"""Mixtures of experts: the router against its formula in NumPy, outputs, padding that holds NaN."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from statecore.models.families._sources import moe
from statecore.models.mixers import Mlp, Moe, initial

DEEPSEEK = Moe(
    width=12,
    inner=6,
    num_experts=8,
    num_chosen=3,
    scores="sigmoid",
    num_groups=4,
    num_kept_groups=2,
    has_correction=True,
    scale=2.5,
    shared=Mlp(width=12, inner=10),
)
QWEN = Moe(width=12, inner=6, num_experts=8, num_chosen=2, shared=Mlp(width=12, inner=10), has_shared_gate=True)
NEMOTRON = Moe(
    width=12,
    inner=6,
    num_experts=8,
    num_chosen=2,
    scores="sigmoid",
    has_correction=True,
    is_normalized=False,
    activation="relu2",
    is_gated=False,
    shared=Mlp(width=12, inner=10, activation="relu2", is_gated=False, has_bias=True),
    latent=5,
    has_latent_bias=True,
)
every = pytest.mark.parametrize("mixer", [DEEPSEEK, QWEN, NEMOTRON], ids=["deepseek", "qwen", "nemotron"])


apply = jax.jit(lambda mixer, params, rows: mixer.apply(params, rows), static_argnums=0)
route = jax.jit(lambda mixer, params, rows: mixer.route(params, rows), static_argnums=0)


def params_of(mixer, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(mixer.params))
    drawn = {name: initial(param, key) for (name, param), key in zip(mixer.params.items(), keys, strict=True)}
    if mixer.has_correction:
        drawn["correction"] = 0.3 * jax.random.normal(keys[0], (mixer.num_experts,))
    return drawn


def rows_of(num, seed=1):
    return jax.random.normal(jax.random.key(seed), (num, 12))


def plain_router(mixer, params, row):
    """Returns the weights of one row by expert, as the formula reads."""
    logits = np.array(row, np.float64) @ np.array(params["router"], np.float64)
    scores = 1 / (1 + np.exp(-logits)) if mixer.scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores + np.array(params["correction"]) if mixer.has_correction else scores.copy()
    size = mixer.num_experts // mixer.num_groups
    groups = [range(i, i + size) for i in range(0, mixer.num_experts, size)]
    best = [sum(sorted(choice[list(group)])[-2:]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda i: -best[i])[: mixer.num_kept_groups]
    allowed = [expert for i in sorted(kept) for expert in groups[i]]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: mixer.num_chosen]
    total = sum(scores[expert] for expert in chosen) if mixer.is_normalized else 1.0
    return {expert: scores[expert] / total * mixer.scale for expert in chosen}


def routed(mixer, params, rows):
    weights, chosen = route(mixer, params, rows)
    return [dict(zip(*row, strict=True)) for row in zip(np.array(chosen).tolist(), np.array(weights), strict=True)]


@every
def test_the_router_is_its_formula(mixer):
    params, rows = params_of(mixer), rows_of(40)
    for found, row in zip(routed(mixer, params, rows), rows, strict=True):
        wanted = plain_router(mixer, params, row)
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([found[expert] for expert in wanted], list(wanted.values()), rtol=1e-5)


def test_the_groups_and_the_correction_decide():
    """Without either another expert is chosen somewhere, or this test shows nothing."""
    params, rows = params_of(DEEPSEEK), rows_of(40)
    whole = [set(row) for row in routed(DEEPSEEK, params, rows)]
    ungrouped = dataclasses.replace(DEEPSEEK, num_kept_groups=4)
    assert whole != [set(row) for row in routed(ungrouped, params, rows)]
    assert whole != [set(row) for row in routed(DEEPSEEK, params | {"correction": jnp.zeros(8)}, rows)]


@every
def test_of_equal_scores_the_first_experts_win(mixer):
    """And of equal groups the first."""
    params = params_of(mixer) | {"router": jnp.zeros((12, 8))}
    if mixer.has_correction:
        params["correction"] = jnp.zeros(8)
    for found in routed(mixer, params, rows_of(3)):
        assert list(found) == list(range(mixer.num_chosen))
        assert len(set(found.values())) == 1


def test_the_correction_is_not_in_the_weights():
    """Even a bias that makes every choice."""
    params = params_of(DEEPSEEK) | {"correction": jnp.array([0.0, 0, 9, 9, 0, 0, 9, 0])}
    for found in routed(DEEPSEEK, params, rows_of(5)):
        assert set(found) == {2, 3, 6}
        np.testing.assert_allclose(sum(found.values()), 2.5, rtol=1e-5)


def plain_output(mixer, params, row):
    def mlp(x, first, down):
        inner = x @ first
        if mixer.is_gated:
            gate, up = np.split(inner, 2)
            return (gate / (1 + np.exp(-gate)) * up) @ down
        return np.square(np.maximum(inner, 0)) @ down

    params = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
    row, first = np.array(row, np.float64), "gate_up" if mixer.is_gated else "up"
    inner = row if mixer.latent is None else row @ params["latent_in"] + params["latent_in_bias"]
    out = sum(
        weight * mlp(inner, params[first][expert], params["down"][expert])
        for expert, weight in plain_router(mixer, params, row).items()
    )
    out = out if mixer.latent is None else out @ params["latent_out"] + params["latent_out_bias"]
    shared = mlp(row, params[f"shared_{first}"], params["shared_down"])
    return out + (shared / (1 + np.exp(-row @ params["shared_gate"])) if mixer.has_shared_gate else shared)


@every
@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
def test_the_output_is_its_formula(mixer, num_rows):
    """For few rows, of which each is a block, and for many."""
    params, rows = params_of(mixer), rows_of(num_rows)
    wanted = [plain_output(mixer, params, row) for row in rows]
    np.testing.assert_allclose(np.array(apply(mixer, params, rows)), wanted, rtol=0, atol=1e-5)


@every
@pytest.mark.parametrize("expert", [0, 7])
def test_all_rows_may_choose_one_expert(mixer, expert):
    """And its outputs are those of rows that come alone."""
    params, rows = params_of(mixer), rows_of(40)
    params["router"] = params["router"].at[:, expert].set(0.0)
    if mixer.has_correction:
        params["correction"] = jnp.zeros(8).at[expert].set(9.0)
    else:
        params["router"] = jnp.zeros((12, 8)).at[0, expert].set(50.0)
        rows = rows.at[:, 0].set(1.0)
    assert all(expert in row for row in routed(mixer, params, rows))
    alone = np.concatenate([np.array(apply(mixer, params, row)) for row in rows[:6, None]])
    np.testing.assert_allclose(np.array(apply(mixer, params, rows))[:6], alone, rtol=0, atol=1e-5)


@every
@pytest.mark.parametrize("shape", [(2, 1), (2, 9)])
def test_padding_that_holds_nan_stays_where_it_is(mixer, shape):
    """The other rows keep their bits."""
    params, rows = params_of(mixer), rows_of(shape[0] * shape[1]).reshape(*shape, 12)
    clean = np.array(apply(mixer, params, rows.at[1, -1].set(0.0)))
    dirty = np.array(apply(mixer, params, rows.at[1, -1].set(jnp.nan)))
    is_padding = np.zeros(shape, bool)
    is_padding[1, -1] = True
    assert np.isnan(dirty[is_padding]).all()
    np.testing.assert_array_equal(dirty[~is_padding], clean[~is_padding])


@every
def test_an_expert_that_overflows_hurts_only_those_who_chose_it(mixer):
    params, rows = params_of(mixer), rows_of(40)
    broken = params | {"down": params["down"].at[3].set(jnp.inf)}
    chose = np.array([3 in row for row in routed(mixer, params, rows)])
    assert chose.any() and not chose.all()
    finite = np.isfinite(np.array(apply(mixer, broken, rows))).all(axis=1)
    np.testing.assert_array_equal(finite, ~chose)


def test_one_row_has_the_same_bits_in_a_scan():
    """So a derived verify, which scans steps, commits what steps give."""
    params, rows = params_of(DEEPSEEK), rows_of(6)[:, None]
    steps = [np.array(jax.jit(DEEPSEEK.apply)(params, row)) for row in rows]
    scanned = jax.jit(lambda rows: jax.lax.scan(lambda _, row: (None, DEEPSEEK.apply(params, row)), None, rows)[1])
    np.testing.assert_array_equal(np.array(scanned(rows)), steps)


@every
def test_it_can_be_trained(mixer):
    """Away from where a choice changes."""
    rows = rows_of(12)
    output = jax.jit(lambda params: mixer.apply(params, rows))
    check_grads(output, (params_of(mixer),), 1, ["rev"], atol=0.05, rtol=0.05)


@every
def test_the_router_is_float32_in_half_precision(mixer):
    dtypes = {name: param.dtype(jnp.bfloat16) for name, param in mixer.params.items()}
    kept = {name for name, dtype in dtypes.items() if dtype == jnp.float32}
    assert kept == {"router", "correction"} & dtypes.keys()
    params = {name: leaf.astype(dtypes[name]) for name, leaf in params_of(mixer).items()}
    assert mixer.apply(params, rows_of(9).astype(jnp.bfloat16)).dtype == jnp.bfloat16


@every
def test_a_file_has_every_matrix_of_its_own(mixer):
    """Stacked in the order of the experts, gate before up, and turned."""
    table = moe(mixer, "mlp", shared="shared_expert" if mixer.has_shared_gate else "shared_experts")
    assert table.keys() == mixer.params.keys()
    assert ("mlp.shared_expert_gate.weight" in itertools.chain(*(source.names for source in table.values()))) == (
        mixer.has_shared_gate
    )
    down = table["down"]
    files = [np.random.default_rng(i).normal(size=(5, 6)) for i in range(8)]
    np.testing.assert_array_equal(down.build(np, *files), np.stack([matrix.T for matrix in files]))
    if mixer.is_gated:
        names = table["gate_up"].names[2:4]
        assert names == ("mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight")
        files = [np.random.default_rng(i).normal(size=(6, 5)) for i in range(16)]
        built = table["gate_up"].build(np, *files)
        np.testing.assert_array_equal(built[1], np.concatenate([files[2].T, files[3].T], axis=1))

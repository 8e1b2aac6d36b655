"""Acceptance: greedy, speculative sampling and typical, on distributions that are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from statecore.speculative import _accept, accept_greedy, accept_sampled, accept_typical

VOCAB, DRAFTS, DRAWS = 8, 3, 20_000


def chain(seed: int) -> jax.Array:
    """Logits `[V, V]` of what follows each token."""
    return jax.random.normal(jax.random.key(seed), (VOCAB, VOCAB)) * 1.5


def draws_of(target: jax.Array, draft: jax.Array | None, seed: int, accept=accept_sampled):
    """Returns tokens `[N, K]` that windows over a Markov chain gave: drafts are drawn from `draft`, or certain."""
    num_accepted, tokens = _draws(target, draft, jax.random.key(seed), accept, _accept.residual)
    return np.array(num_accepted), np.array(tokens)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _draws(target, draft, key, accept, residual):
    del residual  # in the signature, so that a planted one compiles anew
    window = [jnp.zeros(DRAWS, jnp.int32)]
    indices = jnp.broadcast_to(jnp.arange(DRAFTS + 1), (DRAWS, DRAFTS + 1))
    keys = None if draft is None else _accept.purpose_keys(key, indices, _accept.DRAFT)
    for place in range(DRAFTS):
        if draft is None or keys is None:
            window.append(jnp.argmax(target, axis=-1)[window[-1]])
        else:
            window.append(jax.vmap(jax.random.categorical)(keys[:, place], draft[window[-1]]))
    rows = jnp.stack(window, axis=1).astype(jnp.int32)
    probs = None if draft is None else jax.nn.softmax(draft)[rows[:, :-1]]
    return accept(key, indices, target[rows], rows, jnp.full(DRAWS, DRAFTS + 1), probs)


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Returns the p-value of Pearson's chi-square of counts; cells that expect fewer than 5 are one."""
    small = expected < 5
    cells = [
        (observed[~small], expected[~small]),
        (observed[small].sum(keepdims=True), expected[small].sum(keepdims=True)),
    ]
    observed, expected = (np.concatenate([pair[i] for pair in cells if pair[1].sum() > 0]) for i in (0, 1))
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(jax.scipy.special.gammaincc((len(expected) - 1) / 2, statistic / 2))


def p_values(target: np.ndarray, tokens: np.ndarray) -> list[float]:
    """Returns p-values of each place given the prefix before it, for prefixes that are common."""
    probs = np.array(jax.nn.softmax(target))
    found = []
    for place in range(DRAFTS + 1):
        before = np.zeros(len(tokens), int) if place == 0 else tokens[:, place - 1]
        for token in range(VOCAB):
            here = tokens[(before == token) & (tokens[:, : place + 1] >= 0).all(axis=1), place]
            if len(here) >= 500:
                found.append(p_value(np.bincount(here, minlength=VOCAB), probs[token] * len(here)))
    return found


@pytest.mark.parametrize("drafts", ["drawn", "certain"])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_distributed_as_the_model_draws_them(drafts, seed):
    """Chi-square of 20,000 draws, given the token before; the least of many p-values is held to its share."""
    target, draft = chain(seed), chain(seed) * 0.5 + chain(seed + 100) * 0.5
    _, tokens = draws_of(target, draft if drafts == "drawn" else None, seed)
    found = p_values(target, tokens)
    assert len(found) >= 2 and min(found) * len(found) > 0.001


def test_a_wrong_residual_is_noticed(monkeypatch):
    """The planted error: after a rejection the model's own distribution is drawn from."""
    target, draft = chain(0), chain(100)
    monkeypatch.setattr(_accept, "residual", lambda target, drawn_from: target)
    _, tokens = draws_of(target, draft, 0)
    assert min(p_values(target, tokens)) < 1e-6


def test_each_purpose_has_its_own_stream():
    """And each sequence and place, whatever window it stands in."""
    key, indices = jax.random.key(0), jnp.array([[4, 5], [4, 5]])
    keys = jax.jit(_accept.purpose_keys)
    found = [np.array(jax.random.key_data(keys(key, indices, purpose))).reshape(-1, 2) for purpose in range(3)]
    assert len({tuple(row) for row in np.concatenate(found).tolist()}) == 12
    later = np.array(jax.random.key_data(keys(key, indices[:, 1:], 1))).reshape(-1, 2)
    assert later.tolist() == found[1][1::2].tolist()


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_expected_length_is_the_series(rate):
    """(1 - a^(K+1)) / (1 - a) tokens a window, for drafts that are accepted with probability a."""
    # A certain draft of the model's likeliest token is accepted as often as the model draws it.
    probs = np.full((VOCAB, VOCAB), (1 - rate) / (VOCAB - 1))
    probs[np.arange(VOCAB), (np.arange(VOCAB) + 3) % VOCAB] = rate
    num_accepted, _ = draws_of(jnp.log(jnp.array(probs, jnp.float32)), None, 3)
    expected = (1 - rate ** (DRAFTS + 1)) / (1 - rate)
    assert abs((num_accepted + 1).mean() - expected) < 4 * num_accepted.std() / np.sqrt(DRAWS)


def test_a_draft_from_the_model_itself_is_always_accepted():
    num_accepted, _ = draws_of(chain(1), chain(1), 1)
    assert (num_accepted == DRAFTS).all()


@pytest.mark.parametrize("wrong", range(1, 5))
def test_greedy_keeps_drafts_up_to_the_first_wrong_one(wrong):
    """F14: the first draft is held against the anchor's row; ragged rows end at their last draft."""
    logits = jax.nn.one_hot(jnp.array([[1, 2, 3, 4], [1, 2, 3, 4]]), VOCAB)
    window = (
        jnp.array([[7, 1, 2, 3], [7, 1, 2, 3]]).at[0, wrong:].set(0) if wrong < 4 else jnp.array([[7, 1, 2, 3]] * 2)
    )
    found = accept_greedy(logits, window, jnp.array([4, 2]))
    assert found.num_accepted.tolist() == [wrong - 1, 1]
    assert found.tokens[0, :wrong].tolist() == [1, 2, 3, 4][:wrong] and (found.tokens[0, wrong:] == -1).all()
    assert found.tokens[1].tolist() == [1, 2, -1, -1]


def test_no_choice_is_told_and_rows_after_it_do_not_matter():
    """NaN is no token; in a row that no draft leads to it is not seen."""
    logits = jax.nn.one_hot(jnp.array([[1, 2, 3]]), VOCAB) * 50.0
    window, key = jnp.array([[7, 1, 2]]), jax.random.key(0)
    indices = jnp.arange(3)[None]
    for accept in map(jax.jit, (functools.partial(accept_sampled, key, indices), accept_greedy)):
        assert accept(logits.at[0, 1].set(jnp.nan), window, jnp.array([3])).tokens.tolist() == [[1, -1, -1]]
        assert accept(logits.at[0, 2].set(jnp.nan), window, jnp.array([2])).tokens.tolist() == [[1, 2, -1]]


def test_typical_acceptance_is_not_lossless():
    """A certain model rejects what an unsure one takes; and the distribution is another."""
    key, indices, window = jax.random.key(0), jnp.arange(2)[None], jnp.array([[0, 1]])
    sure = jnp.log(jnp.array([[[0.95, 0.05] + [1e-9] * 6] * 2]))
    unsure = jnp.zeros((1, 2, VOCAB))
    accept = jax.jit(accept_typical)
    assert accept(key, indices, sure, window, jnp.array([2])).num_accepted.tolist() == [0]
    assert accept(key, indices, unsure, window, jnp.array([2])).num_accepted.tolist() == [1]
    target = chain(0)
    _, tokens = draws_of(target, None, 0, _typical)
    assert min(p_values(target, tokens)) < 1e-6


def _typical(key, indices, logits, window, num_valid, draft_probs):
    assert draft_probs is None
    return accept_typical(key, indices, logits, window, num_valid)

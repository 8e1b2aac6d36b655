"""Samplers: draws alone and in windows, penalties, Mirostat, forced tokens, overrides, distributions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore.generation import choose
from statecore.generation._forced import Forced
from statecore.generation._sampler import Mirostat, Sampler, check_sampler
from statecore.generation._sampler_state import SamplerState, advance, initial_state, overridden
from statecore.generation._sampling import draw, drawn_tokens, top_logprobs

V, B, K = 16, 2, 4
KEY = jax.random.key(7)

SAMPLERS = {
    "greedy": Sampler(),
    "sampled": Sampler(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01),
    "greedy-penalties": Sampler(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "penalties": Sampler(temperature=1.1, repetition_penalty=0.7, presence_penalty=-0.5, frequency_penalty=0.37),
    "biased": Sampler(temperature=0.8, logit_bias={3: 2.5, 5: -100.0, 0: 0.3}),
    "mirostat": Sampler(temperature=1.3, mirostat=Mirostat(tau=2.0, eta=0.3)),
    "everything": Sampler(
        temperature=0.7,
        top_k=14,
        top_p=0.99,
        min_p=0.001,
        repetition_penalty=1.2,
        frequency_penalty=0.21,
        logit_bias={1: 1.0},
        mirostat=Mirostat(tau=1.5, eta=0.2),
    ),
}
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
PENALISED = {name: sampler for name, sampler in SAMPLERS.items() if sampler.uses_penalties}


def logits_of(seed, width=K, dtype=jnp.float32):
    return jnp.array(3 * np.random.default_rng(seed).normal(size=(B, width, V)), dtype)


def bits(tree):
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [(str(leaf.dtype), leaf.shape, np.array(leaf).tobytes()) for leaf in leaves]


def history(seed):
    rng = np.random.default_rng(seed)
    return tuple([rng.integers(0, V, size=size).tolist() for size in sizes] for sizes in ((5, 2), (3, 3)))


def alone(sampler, state, logits, start, allowed=None, forced=None):
    """Draws the rows one by one; returns the draws, and the state before and after each."""
    steps, states = [], [state]
    for k in range(logits.shape[1]):
        at = (
            {}
            if allowed is None
            else {"allowed": allowed[:, k : k + 1], "forced": forced if k == 0 else forced * 0 - 1}
        )
        drawn = draw(sampler, states[-1], np.full((B, 1), start + k), logits[:, k : k + 1], num_logprobs=2, **at)
        states.append(advance(states[-1], drawn.tokens, [1] * B, drawn.mus))
        steps.append(drawn)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *steps), states


# Law: a window is its rows, one by one.


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@by_sampler
@given(seed=st.integers(0, 2**20))
def test_a_window_draws_what_its_rows_draw_alone(sampler, masked, seed):
    """F75: bit for bit, in tokens, mu, log-probabilities and the state after it."""
    prompts, outputs = history(seed)
    state = initial_state(sampler, KEY, prompts, outputs, V)
    logits, rng = np.array(logits_of(seed)), np.random.default_rng(seed + 1)
    options = {}
    if masked:
        options["allowed"] = rng.random((B, K, V)) < 0.5
        options["allowed"][..., 2] = True
        options["forced"] = np.array([-1, 2], np.int32)
    wanted, states = alone(sampler, state, logits, 3, **options)
    window = np.concatenate([[[row[-1]] for row in outputs], wanted.tokens[:, :-1]], axis=1)
    indices = 3 + np.broadcast_to(np.arange(K), (B, K))
    got = draw(sampler, state, indices, logits, window=window, num_logprobs=2, **options)
    assert bits(got) == bits(wanted)
    assert bits(advance(state, got.tokens, [K] * B, got.mus)) == bits(states[K])
    # Part of a window, different from row to row.
    num_kept = rng.integers(0, K + 1, size=B)
    part = advance(state, got.tokens, num_kept, got.mus)
    for row, number in enumerate(num_kept):
        for name in ("counts", "mu"):
            leaf, step = getattr(part, name), getattr(states[number], name)
            assert (leaf is None) == (step is None)
            assert leaf is None or bits(np.array(leaf)[row]) == bits(np.array(step)[row])


@pytest.mark.parametrize("sampler", [SAMPLERS["greedy"], SAMPLERS["sampled"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(seed=st.integers(0, 2**20))
def test_draws_are_those_of_choose(sampler, dtype, seed):
    """Nothing that was drawn before there were penalties has moved."""
    state = initial_state(sampler, KEY, [[1]] * B, [[]] * B, V)
    indices, logits = np.random.default_rng(seed).integers(0, 99, (B, K)), logits_of(seed, dtype=dtype)
    wanted = choose(sampler, KEY, indices, logits)
    assert draw(sampler, state, indices, logits).tokens.tolist() == wanted.tolist()


def test_choose_refuses_what_it_would_leave_out():
    for name in ("greedy-penalties", "biased", "mirostat"):
        with pytest.raises(sc.UnsupportedError, match="draw"):
            choose(SAMPLERS[name], KEY, np.zeros((B, 1)), logits_of(0, 1))


# The settings, against their definitions in NumPy.


def penalised(sampler, logits, prompt, output):
    """The definition, written out: float64, token by token."""
    scores = np.array(logits, np.float64)
    for token in range(V):
        if token in prompt or token in output:
            scores[token] = (
                scores[token] / sampler.repetition_penalty
                if scores[token] > 0
                else scores[token] * sampler.repetition_penalty
            )
        scores[token] -= sampler.frequency_penalty * output.count(token)
        scores[token] -= sampler.presence_penalty * (token in output)
    for token, bias in sampler.logit_bias:
        scores[token] += bias
    return scores


@given(
    seed=st.integers(0, 2**20),
    repetition=st.floats(0.5, 2),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), min_size=3, max_size=4),
)
def test_penalties_by_definition(seed, repetition, presence, frequency, bias):
    """Repetition counts prompt and output (1909.05858); presence and frequency the output alone."""
    sampler = Sampler(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    prompts, outputs = history(seed)
    state, logits = initial_state(sampler, None, prompts, outputs, V), logits_of(seed, 1)
    tokens = draw(sampler, state, np.zeros((B, 1), int), logits).tokens[:, 0].tolist()
    for row, token in enumerate(tokens):
        scores = penalised(sampler, logits[row, 0], prompts[row], outputs[row])
        assert scores[token] >= scores.max() - 1e-4


def test_accepting_three_moves_the_counts_by_three():
    """F75."""
    sampler = PENALISED["penalties"]
    state = initial_state(sampler, KEY, [[1], [2]], [[4], [4]], V)
    after = advance(state, np.array([[4, 4, 5, 9], [7, 8, 9, 1]]), [3, 0])
    assert (np.array(after.counts) - np.array(state.counts)).sum(axis=1).tolist() == [3, 0]
    assert np.array(after.counts)[0, [4, 5, 9]].tolist() == [3, 1, 0]
    assert after.in_prompt is state.in_prompt


def test_wrong_counts_and_shapes_are_refused():
    sampler = SAMPLERS["everything"]
    state = initial_state(sampler, KEY, [[1], [2]], [[], []], V)
    tokens, mus = np.zeros((B, 3), int), jnp.zeros((B, 3))
    for num_kept in ([4, 0], [-1, 0], [1], 1):
        with pytest.raises(sc.GeometryError):
            advance(state, tokens, num_kept, mus)
    with pytest.raises(sc.GeometryError, match="mus"):
        advance(state, tokens, [1, 1])
    logits, indices = logits_of(0), np.zeros((B, K), int)
    for options in (
        {},
        {"window": np.zeros((B, 3), int)},
        {"window": indices, "allowed": np.ones((B, V), bool)},
        {"window": indices, "forced": np.array([0])},
        {"window": indices, "forced": np.array([V, -1])},
        {"window": indices, "forced": np.array([-2, -1])},
    ):
        with pytest.raises(sc.GeometryError):
            draw(sampler, state, indices, logits, **options)
    with pytest.raises(sc.GeometryError):
        draw(sampler, state, indices, logits[0])
    with pytest.raises(sc.GeometryError, match="vocabulary"):
        initial_state(sampler, KEY, [[V]], [[]], V)
    with pytest.raises(sc.GeometryError):
        initial_state(sampler, KEY, [[1], [2]], [[]], V)
    for wrong in (-1, V + 1):
        with pytest.raises(sc.UnsupportedError, match="num_logprobs"):
            draw(sampler, state, indices, logits, window=indices, num_logprobs=wrong)


def test_a_state_of_other_settings_is_refused():
    greedy = initial_state(Sampler(), None, [[1]] * B, [[]] * B, V)
    logits, indices = logits_of(0, 1), np.zeros((B, 1), int)
    assert jax.tree.leaves(greedy) == [] and greedy.nbytes == 0
    with pytest.raises(sc.UnsupportedError, match="key"):
        draw(Sampler(temperature=1.0), greedy, indices, logits)
    with pytest.raises(sc.UnsupportedError, match="counts"):
        draw(PENALISED["greedy-penalties"], greedy, indices, logits)
    keyed = dataclasses.replace(greedy, key=KEY)
    with pytest.raises(sc.UnsupportedError, match="mu"):
        draw(SAMPLERS["mirostat"], keyed, indices, logits)


def test_values_never_recompile():
    from statecore.generation._sampling import _draws

    state = initial_state(SAMPLERS["everything"], KEY, [[1]] * B, [[]] * B, V)
    logits, indices = logits_of(0, 3), np.zeros((B, 3), int)
    run = lambda sampler: draw(sampler, state, indices, logits, window=indices)  # noqa: E731
    run(SAMPLERS["everything"])
    compiled = _draws._cache_size()
    for changes in (
        {"temperature": 0.2},
        {"top_k": 3, "top_p": 0.4},
        {"frequency_penalty": 1.0},
        {"logit_bias": {7: -3.0}},
        {"mirostat": Mirostat(tau=9.0, eta=0.01)},
    ):
        run(dataclasses.replace(SAMPLERS["everything"], **changes))
    assert _draws._cache_size() == compiled


@pytest.mark.slow
@by_sampler
def test_draws_under_jit_are_those_outside(sampler):
    state = initial_state(sampler, KEY, *history(3), V)
    logits, indices = logits_of(3), np.zeros((B, K), int) + np.arange(K)
    plain = draw(sampler, state, indices, logits, window=indices)

    @jax.jit
    def both(state, logits):
        drawn = draw(sampler, state, indices, logits, window=indices)
        return drawn, advance(state, drawn.tokens, jnp.array([2, 9]), drawn.mus)

    drawn, after = both(state, logits)
    assert drawn.tokens.tolist() == plain.tokens.tolist()
    # Nothing can be raised inside a trace, so a count out of range keeps nothing.
    wanted = advance(state, plain.tokens, [2, 0], plain.mus)
    assert bits(after.counts) == bits(wanted.counts)
    assert np.allclose(after.mu, wanted.mu, rtol=1e-6) if wanted.mu is not None else after.mu is None


# Log-probabilities.


@by_sampler
def test_log_probabilities_are_of_the_models_own_distribution(sampler):
    state, logits = initial_state(sampler, KEY, *history(1), V), logits_of(5)
    indices = np.zeros((B, K), int)
    drawn = draw(sampler, state, indices, logits, window=indices, num_logprobs=3)
    exact = np.array(logits, np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        drawn.logprobs, np.take_along_axis(exact, np.array(drawn.tokens)[..., None], -1)[..., 0], rtol=1e-5, atol=1e-5
    )
    order = np.argsort(-exact, axis=-1)[..., :3]
    assert np.array(drawn.top.tokens).tolist() == order.tolist()
    np.testing.assert_allclose(drawn.top.logprobs, np.take_along_axis(exact, order, -1), rtol=1e-5, atol=1e-5)
    top = top_logprobs(logits, 3)
    assert bits(top) == bits(drawn.top)
    assert draw(sampler, state, indices, logits, window=indices).logprobs is None
    for wrong in (0, V + 1):
        with pytest.raises(sc.UnsupportedError):
            top_logprobs(logits, wrong)


# Constraints, broken logits.


@by_sampler
def test_only_allowed_tokens_are_drawn(sampler):
    state = initial_state(sampler, KEY, *history(2), V)
    allowed = np.zeros((B, 1, V), bool)
    allowed[0, 0, [3, 4]] = allowed[1, 0, 9] = True
    seen = [draw(sampler, state, np.full((B, 1), i), logits_of(i, 1), allowed=allowed).tokens for i in range(20)]
    assert {int(pair[0, 0]) for pair in seen} <= {3, 4} and {int(pair[1, 0]) for pair in seen} == {9}


def test_nothing_allowed_is_refused_in_live_rows_alone():
    state, indices = initial_state(Sampler(), None, *history(2), V), np.zeros((B, 2), int)
    allowed = np.ones((B, 2, V), bool)
    allowed[1, 1] = False
    with pytest.raises(sc.UnsupportedError, match="sequence 1 allows no token in window row 1"):
        draw(Sampler(), state, indices, logits_of(0, 2), allowed=allowed)
    live = np.array([[True, True], [True, False]])
    drawn_tokens(draw(Sampler(), state, indices, logits_of(0, 2), allowed=allowed, live=live), live)


@by_sampler
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_broken_logits_are_no_choice(sampler, poison):
    state = initial_state(sampler, KEY, *history(2), V)
    logits = logits_of(1, 1).at[1, 0, 4].set(poison)
    drawn = draw(sampler, state, np.zeros((B, 1), int), logits)
    assert drawn.tokens[1, 0] == -1 and drawn.tokens[0, 0] >= 0
    with pytest.raises(sc.NonFiniteError, match="sequence 1"):
        drawn_tokens(drawn)
    assert drawn_tokens(drawn, np.array([[True], [False]]))[0, 0] == drawn.tokens[0, 0]
    nothing = draw(sampler, state, np.zeros((B, 1), int), jnp.full((B, 1, V), -jnp.inf))
    assert (np.array(nothing.tokens) == -1).all()


# Forced tokens.


@by_sampler
@given(seed=st.integers(0, 2**20), token=st.integers(0, V - 1))
def test_ne4_a_forced_token_is_an_ordinary_draw(sampler, seed, token):
    """NE4: emitted whatever the logits; one draw if sampled, so that later draws are those of its index."""
    prompts, outputs = history(seed)
    state, logits = initial_state(sampler, KEY, prompts, outputs, V), logits_of(seed, 2)
    # Minus infinity in the model's own logits does not stop it.
    first = logits[:, :1].at[0, 0, token].set(-jnp.inf)
    forced = Forced.none(B).force(0, token, vocab_size=V)
    drawn = draw(sampler, state, np.full((B, 1), 3), first, forced=forced.array())
    plain = draw(sampler, state, np.full((B, 1), 3), first)
    assert drawn.tokens[0, 0] == token
    assert bits((drawn.tokens[1], None if drawn.mus is None else drawn.mus[1])) == bits(
        (plain.tokens[1], None if plain.mus is None else plain.mus[1])
    )
    if sampler.mirostat is not None:
        # Probability 1 is a surprise of 0.
        tau, eta = np.float32(sampler.mirostat.tau), np.float32(sampler.mirostat.eta)
        assert np.array(drawn.mus)[0, 0] == np.array(state.mu)[0] - eta * (np.float32(0) - tau)
    # The next draw is that of a run whose output holds the token.
    tokens = np.array(drawn.tokens)
    after = advance(state, tokens, [1, 1], drawn.mus)
    rebuilt = initial_state(
        sampler, KEY, prompts, [[*row, int(t)] for row, t in zip(outputs, tokens[:, 0], strict=True)], V
    )
    assert bits((after.counts, after.in_prompt, after.key)) == bits((rebuilt.counts, rebuilt.in_prompt, rebuilt.key))
    rebuilt = dataclasses.replace(rebuilt, mu=after.mu)
    args = np.full((B, 1), 4), logits[:, 1:]
    assert bits(draw(sampler, after, *args)) == bits(draw(sampler, rebuilt, *args))


def test_ne4_rules_of_a_forced_token():
    """NE4: range, mask, one pending, a value for snapshots, consumed once, cleared without a trace."""
    none = Forced.none(B)
    assert none.array() is None
    pending = none.force(1, 5, vocab_size=V)
    assert none.array() is None and pending.array().tolist() == [-1, 5]
    with pytest.raises(sc.LifecycleError, match="pending"):
        pending.force(1, 6, vocab_size=V)
    for row, token in ((0, V), (0, -1), (0, 1.5), (0, True), (B, 1), (-1, 1)):
        with pytest.raises(sc.GeometryError):
            none.force(row, token, vocab_size=V)
    with pytest.raises(sc.UnsupportedError, match="constraint"):
        none.force(0, 3, vocab_size=V, allowed=np.arange(V) != 3)
    assert none.force(0, 3, vocab_size=V, allowed=np.arange(V) == 3).tokens == (3, None)
    assert pending.consumed(np.array([1, 0])) == pending
    assert pending.consumed(np.array([0, 2])) == none == pending.cleared(1)
    with pytest.raises(sc.GeometryError):
        pending.cleared(B)
    state = initial_state(Sampler(), None, *history(0), V)
    allowed = np.ones((B, 1, V), bool)
    allowed[1, 0, 5] = False
    with pytest.raises(sc.UnsupportedError, match="forced on sequence 1"):
        draw(Sampler(), state, np.zeros((B, 1), int), logits_of(0, 1), forced=pending.array(), allowed=allowed)


# Overrides.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"mirostat": Mirostat(), "temperature": 0}, "mirostat needs a draw"),
        ({"mirostat": Mirostat(tau=0.0)}, "tau"),
        ({"mirostat": Mirostat(tau=float("nan"))}, "tau"),
        ({"mirostat": Mirostat(eta=-1.0)}, "eta"),
        ({"mirostat": Mirostat(eta=float("inf"))}, "eta"),
        ({"mirostat": 5.0}, "mirostat"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {V: 1.0}}, "vocabulary"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": {1: float("-inf")}}, "constraint"),
        ({"logit_bias": {"a": 1.0, 2: 1.0}}, "token 'a'"),
        ({"logit_bias": 3}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "twice"),
        ({"heat": 1.0}, "heat"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_ne1_overrides_that_mean_nothing_change_nothing(changes, named):
    """NE1: named, and before any change."""
    prompts, outputs = history(0)
    sampler = SAMPLERS["sampled"]
    state = initial_state(sampler, KEY, prompts, outputs, V)
    before = bits(state)
    with pytest.raises(sc.UnsupportedError, match=named):
        overridden(sampler, state, prompts=prompts, outputs=outputs, vocab_size=V, **changes)
    assert bits(state) == before


def test_all_faults_are_named_at_once():
    wrong = Sampler(temperature=-1.0, top_k=0, presence_penalty=9.0, logit_bias={99: 1.0})
    with pytest.raises(sc.UnsupportedError) as error:
        check_sampler(wrong, V)
    assert all(name in str(error.value) for name in ("temperature", "top_k", "presence_penalty", "99"))
    check_sampler(Sampler(logit_bias={99: 1.0}))  # the vocabulary is not known here


def test_ne1_sampling_needs_a_key():
    """NE1: a run begun greedy without a seed must be given one."""
    prompts, outputs = history(0)
    rest = {"prompts": prompts, "outputs": outputs, "vocab_size": V}
    state = initial_state(Sampler(), None, prompts, outputs, V)
    with pytest.raises(sc.UnsupportedError, match="seed"):
        overridden(Sampler(), state, temperature=1.0, **rest)
    sampler, seeded = overridden(Sampler(), state, temperature=1.0, seed=7, **rest)
    assert sampler.temperature == 1.0 and bits(seeded.key) == bits(KEY)
    with pytest.raises(sc.UnsupportedError, match="seed"):
        initial_state(sampler, None, prompts, outputs, V)


@given(seed=st.integers(0, 2**20))
def test_ne2_the_stream_survives_a_greedy_stretch(seed):
    """NE2: stochastic, greedy, stochastic goes on in the same stream; a new temperature keeps the key."""
    prompts, outputs = history(seed)
    rest = {"prompts": prompts, "outputs": outputs, "vocab_size": V}
    warm = PENALISED["penalties"]
    state = initial_state(warm, KEY, prompts, outputs, V)
    cold, middle = overridden(warm, state, temperature=0.0, **rest)
    again, back = overridden(cold, middle, temperature=warm.temperature, **rest)
    assert again == warm and bits(back) == bits(state)
    args = np.full((B, 1), 5), logits_of(seed, 1)
    assert bits(draw(again, back, *args)) == bits(draw(warm, state, *args))
    assert draw(cold, middle, *args).tokens.tolist() == draw(cold, state, *args).tokens.tolist()


def test_ne2_a_new_seed_changes_the_key_alone():
    """NE2, NE3: counts and mu stay; nothing is drawn, so the state is the very same arrays."""
    prompts, outputs = history(3)
    rest = {"prompts": prompts, "outputs": outputs, "vocab_size": V}
    sampler = SAMPLERS["everything"]
    state = dataclasses.replace(initial_state(sampler, KEY, prompts, outputs, V), mu=jnp.array([1.25, 3.5]))
    same, reseeded = overridden(sampler, state, seed=8, **rest)
    assert same == sampler and bits(reseeded.key) == bits(jax.random.key(8)) != bits(KEY)
    assert all(getattr(reseeded, name) is getattr(state, name) for name in ("counts", "in_prompt", "mu"))
    _, retuned = overridden(sampler, state, mirostat=Mirostat(tau=9.0), **rest)
    assert retuned.mu is state.mu and retuned.key is state.key
    _, off = overridden(sampler, state, mirostat=None, repetition_penalty=1.0, frequency_penalty=0.0, **rest)
    assert (off.mu, off.counts, off.in_prompt) == (None, None, None)


@given(seed=st.integers(0, 2**20))
def test_penalties_switched_on_count_the_whole_history(seed):
    prompts, outputs = history(seed)
    plain, sampler = SAMPLERS["sampled"], PENALISED["penalties"]
    state = initial_state(plain, KEY, prompts, outputs, V)
    assert state.counts is None
    changes = {"temperature": sampler.temperature, "repetition_penalty": 0.7, "mirostat": Mirostat(tau=3.0)}
    _, on = overridden(plain, state, prompts=prompts, outputs=outputs, vocab_size=V, **changes)
    assert np.array(on.counts).tolist() == [[row.count(t) for t in range(V)] for row in outputs]
    assert np.array(on.in_prompt).tolist() == [[t in row for t in range(V)] for row in prompts]
    assert np.array(on.mu).tolist() == [6.0, 6.0]


# Distributions.

COUNT = 20_000
LOGITS = np.array([1.3, 0.9, 0.4, 0.0, -0.5, -1.1, -1.8, -2.5])
# The 0.9999 quantiles of chi-square with 1 to 7 degrees of freedom.
QUANTILES = [15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88]


def kept_by_definition(sampler):
    """Tempered probabilities of the 8 tokens, which stand in falling order, cut by the settings in float64."""
    p = np.exp(LOGITS / sampler.temperature)
    p /= p.sum()
    rank, before = np.arange(8), np.cumsum(p) - p
    p = np.where((rank < (sampler.top_k or 8)) & (before < sampler.top_p) & (p >= sampler.min_p * p[0]), p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.12},
        {"top_k": 6, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=str,
)
def test_chi_square_of_the_draws(changes):
    sampler = Sampler(**{"temperature": 0.8, **changes})
    state = initial_state(sampler, jax.random.key(0), [[1]], [[]], 8)
    logits = jnp.broadcast_to(jnp.array(LOGITS, jnp.float32), (1, COUNT, 8))
    tokens = np.array(draw(sampler, state, np.arange(COUNT)[None], logits).tokens)[0]
    seen, wanted = np.bincount(tokens, minlength=8), COUNT * kept_by_definition(sampler)
    kept = wanted > 0
    assert seen[~kept].sum() == 0
    statistic = ((seen[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    assert statistic < QUANTILES[kept.sum() - 2]


def test_mirostat_by_definition():
    """The paper's second algorithm (2007.14966) in float64, driven by the tokens that were drawn."""
    mirostat = Mirostat(tau=2.0, eta=0.25)
    sampler = Sampler(temperature=1.0, mirostat=mirostat)
    state = initial_state(sampler, KEY, [[1]] * B, [[]] * B, V)
    assert np.array(state.mu).tolist() == [4.0] * B
    mu = np.full(B, 4.0)
    for index in range(60):
        logits = logits_of(index, 1)
        drawn = draw(sampler, state, np.full((B, 1), index), logits)
        for row, token in enumerate(np.array(drawn.tokens)[:, 0]):
            p = np.exp(np.array(logits[row, 0], np.float64))
            p /= p.sum()
            kept = (-np.log2(p) <= mu[row]) | (p == p.max())
            assert kept[token]
            mu[row] -= mirostat.eta * (-np.log2(p[token] / p[kept].sum()) - mirostat.tau)
        np.testing.assert_allclose(drawn.mus[:, 0], mu, atol=1e-4)
        state = advance(state, drawn.tokens, [1] * B, drawn.mus)


@pytest.mark.parametrize("tau", [1.0, 1.8, 2.3])
def test_mirostats_mean_surprise_approaches_tau(tau):
    """From logits whose own entropy is above all three, so that there is something to hold down."""
    sampler = Sampler(temperature=1.0, mirostat=Mirostat(tau=tau, eta=0.1))
    state = initial_state(sampler, KEY, [[1]] * B, [[]] * B, 8)
    width = 4000
    logits = jnp.broadcast_to(jnp.array(LOGITS, jnp.float32), (B, width, 8))
    indices = np.broadcast_to(np.arange(width), (B, width))
    drawn = draw(sampler, state, indices, logits)
    p = np.exp(LOGITS)
    p /= p.sum()
    assert -(p * np.log2(p)).sum() > 2.3
    # The surprise of each token among those that its mu kept, in float64.
    before = np.concatenate([np.full((B, 1), 2 * tau), np.array(drawn.mus, np.float64)[:, :-1]], axis=1)
    kept = (-np.log2(p) <= before[..., None]) | (p == p.max())
    surprise = -np.log2(p[np.array(drawn.tokens)] / (p * kept).sum(-1))
    np.testing.assert_allclose(surprise[:, 500:].mean(axis=1), tau, atol=0.05)


def test_a_state_is_a_value():
    state = initial_state(SAMPLERS["everything"], KEY, *history(0), V)
    assert isinstance(jax.tree.map(lambda leaf: leaf, state), SamplerState)
    assert state.nbytes == B * V * 4 + B * V + B * 4 + KEY.nbytes
    before = bits(state)
    drawn = draw(SAMPLERS["everything"], state, np.zeros((B, 1), int), logits_of(0, 1))
    advance(state, drawn.tokens, [1, 1], drawn.mus)
    assert bits(state) == before

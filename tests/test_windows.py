"""Speculation in one loop on the device: the tokens, states and counts of one call a window."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generations import WARM, start
from helpers import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import statecore as sc
from statecore.generation._windows import SPAN
from statecore.speculative import NGramDraft

PENALTY = sc.Sampler(frequency_penalty=0.3)
SAMPLERS = {
    "greedy": sc.Sampler(),
    "penalty": PENALTY,
    "sampled": WARM,
    "mirostat": sc.Sampler(temperature=0.9, mirostat=sc.Mirostat(tau=2.0, eta=0.2)),
}
DRAFT = NGramDraft(num_draft=4, min_ngram=1, worth=0.0)


class OnHost:
    """The same guesses, without a form for the device."""

    def __init__(self, draft: NGramDraft):
        self.num_draft, self.worth, self.propose = draft.num_draft, draft.worth, draft.propose


class Scripted:
    """Guesses on the device from what is known to come, wrong from place `wrong(length)` of the window on."""

    num_draft = 3

    def __init__(self, known: list[list[int]], wrong, worth: float = 0.0):
        extent = max(map(len, known)) + 8
        table = jnp.array([row + [0] * (extent - len(row)) for row in known], jnp.int32)
        self.worth = worth

        def guess(history, length, limit):
            rows = jnp.take_along_axis(table, length[:, None] + jnp.arange(limit), axis=1)
            rows = jnp.where(jnp.arange(limit) >= wrong(length[:, None]), (rows + 1) % 10, rows)
            return rows, jnp.full_like(length, limit)

        self.device_guess = guess

    def propose(self, history, limit):
        return [9] * limit  # a draft that the loop should have asked instead is noticed by what it accepts


@settings(max_examples=200)
@given(data=st.data(), max_ngram=st.integers(1, 5), min_ngram=st.integers(1, 3), limit=st.integers(1, 4))
def test_the_device_guesses_what_the_host_guesses(data, max_ngram, min_ngram, limit):
    histories = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=3, max_size=3))
    draft = NGramDraft(num_draft=4, max_ngram=max_ngram, min_ngram=min_ngram)
    rows = np.zeros((3, 24), np.int32)
    for row, history in zip(rows, histories, strict=True):
        row[: len(history)] = history
    tokens, counts = _guesses(draft.device_guess, rows, np.array([len(row) for row in histories], np.int32))
    counts = np.minimum(counts, limit)
    found = [row[:count].tolist() for row, count in zip(np.array(tokens), counts.tolist(), strict=True)]
    assert found == [draft.propose(history, limit) for history in histories]


def _guesses(guess, rows, lengths):
    return jax.jit(guess, static_argnums=2)(rows, lengths, 4)


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("digit-own", "greedy"),
        *[pytest.param("decay", name, marks=[] if name == "sampled" else pytest.mark.slow) for name in SAMPLERS],
    ],
)
@settings(max_examples=5)
@given(num_tokens=st.integers(5, 2 * SPAN), stop=st.sampled_from([None, 0, 7]))
def test_the_loop_gives_what_rounds_of_the_host_give(name, sampler, num_tokens, stop):
    """Rows that accept different counts, stop at different places, and everything that the sampler carries."""
    options = {"sampler": SAMPLERS[sampler], "seed": 3, "max_tokens": 2 * SPAN + 3}
    if stop is not None:
        options["stop_tokens"] = [stop]
    gen, host, plain = (start(name, **options) for _ in range(3))
    gen.run(num_tokens, speculate=DRAFT)
    host.run(num_tokens, speculate=OnHost(DRAFT))
    plain.run(num_tokens)
    assert gen.tokens == host.tokens == plain.tokens and gen.finish == plain.finish and gen.status is plain.status
    assert sc.equal(cases()[name].backend, gen.runtime.state, plain.runtime.state)
    assert gen.runtime.lengths.tolist() == plain.runtime.lengths.tolist()
    assert gen.speculation.num_tokens > 0 or num_tokens < 8
    for one, other in zip(jax.tree.leaves(gen._run.sampling), jax.tree.leaves(plain._run.sampling), strict=True):
        if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("batch", [1, 4])
def test_f14_a_draft_that_is_wrong_at_a_place_is_cut_there(batch):
    """F14: the first guess wrong accepts none; every place is the wrong one at some time."""
    prompt = [[1, 2, 3, 4], [5, 6], [7], [8, 9, 1]][:batch]
    plain, gen = (start("digit", batch=batch, prompt=prompt, max_tokens=48) for _ in range(2))
    plain.run(48)
    known = [row + one for row, one in zip(prompt, plain._run.tokens, strict=True)]
    places = jnp.array(np.random.default_rng(0).integers(0, 4, 64))
    gen.run(40, speculate=Scripted(known, lambda length: places[length]))
    gen.run(8)
    assert gen.tokens == plain.tokens
    assert sc.equal(cases()["digit"].backend, gen.runtime.state, plain.runtime.state)
    found = gen.speculation
    assert found.num_accepted == sum(found.accepted_at) and all(found.accepted_at)
    assert found.num_verifies > found.accepted_at[0] > found.accepted_at[2]


def test_a_loop_in_a_restored_run_repeats_itself():
    gen = start(sampler=WARM, seed=1, max_tokens=80)
    gen.run(20, speculate=DRAFT)
    snap = gen.snapshot()
    first = gen.run(40, speculate=DRAFT)
    gen.restore(snap)
    assert gen.run(40, speculate=DRAFT) == first


@settings(max_examples=5)
@given(
    turns=st.lists(st.tuples(st.sampled_from(["loop", "host", "plain"]), st.integers(1, 12)), min_size=2, max_size=6)
)
def test_loops_rounds_and_steps_mix(turns):
    drafts = {"loop": DRAFT, "host": OnHost(DRAFT), "plain": None}
    gen, plain = (start("digit-own", max_tokens=80) for _ in range(2))
    for kind, num_tokens in turns:
        assert gen.run(num_tokens, speculate=drafts[kind]) == plain.run(num_tokens)
    assert sc.equal(cases()["digit-own"].backend, gen.runtime.state, plain.runtime.state)


@pytest.mark.parametrize("after", [0, 10])
def test_logits_that_are_not_finite_are_refused_and_mended(after):
    """What was emitted before them is kept; a restore goes on."""
    case = cases()["decay"]
    bad = jax.tree.map(lambda leaf: leaf * np.nan, case.params)
    model = sc.load((case.backend, case.params))
    runtime = sc.Runtime(model, capacity=64)
    gen = sc.Generation(runtime, [1, 2, 3], max_tokens=40)
    if after:
        gen.run(after)
    snap = gen.snapshot()
    runtime.model = model.with_params(bad)
    with pytest.raises(sc.NonFiniteError):
        gen.run(10, speculate=DRAFT)
    assert len(gen.tokens) == after
    runtime.model = model
    gen.restore(snap)
    gen.run(10, speculate=DRAFT)
    assert len(gen.tokens) == after + 10


@pytest.mark.slow
def test_drafts_that_do_not_pay_are_given_up_for_a_while():
    """And the text is the same; those that pay are always asked."""
    plain = start("digit", max_tokens=60).run(60)
    known = [row + one for row, one in zip([[1, 2, 3, 4], [5, 6]], plain, strict=True)]
    counts = []
    for wrong, worth in ((0, 0.0), (0, 1.5), (3, 1.5)):
        gen = start("digit", max_tokens=60)
        assert gen.run(60, speculate=Scripted(known, lambda _, wrong=wrong: wrong, worth)) == plain
        counts.append(gen.speculation)
    assert counts[1].num_verifies < counts[0].num_verifies / 3
    assert counts[2].num_tokens == 120 and counts[2].num_verifies == 30


def test_pauses_are_taken_up_between_calls():
    gen = start("digit", max_tokens=80)
    chunks = itertools.islice(gen.stream(40, speculate=DRAFT), 6)
    assert len(list(chunks)) == 6


def test_a_state_that_nothing_undoes_takes_no_guesses():
    from statecore import planes as pl

    case = cases()["decay"]
    planes = {**case.backend.planes, "h": pl.opaque(batch_axis=1)}
    functions = case.backend.functions
    backend = sc.Backend(init=functions.init, step=functions.step, planes=planes)
    runtime = sc.Runtime(sc.load((backend, case.params)), capacity=32)
    gen = sc.Generation(runtime, [1, 2, 3], max_tokens=8)
    state = runtime.state
    with pytest.raises(sc.RollbackError, match="opaque"):
        gen.run(8, speculate=Scripted([[9] * 40], lambda _: 3))
    assert runtime.state is state and gen.tokens == []
    with pytest.raises(sc.UnsupportedError, match="opaque"):
        runtime.speculate(None, None, most=np.array([1]))  # pyright: ignore[reportArgumentType]

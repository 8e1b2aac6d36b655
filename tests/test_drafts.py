"""Drafts with a state of their own: draft models and self-speculation."""

import jax
import numpy as np
import pytest
from generations import WARM, model, start
from helpers import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accept import p_value

import statecore as sc
from statecore import testing
from statecore.speculative import ModelDraft, NGramDraft, SelfDraft

NUM = 18


def other(name: str = "decay", shift: float = 0.02) -> sc.Model:
    """A draft model that is right about some tokens only."""
    found = model(name)
    params = found.params
    if params is not None:
        params = {**params, "readout": params["readout"] + shift * np.cos(np.arange(80)).reshape(5, 16)}
    return found.with_params(params)


DRAFTS = {
    "right": ModelDraft(model=model("decay")),
    "other": ModelDraft(model=other()),
    "short": ModelDraft(model=other(shift=0.3), num_draft=1),
}


def held_by(gen, draft):
    """Checks that the draft's state holds emitted tokens alone, bit for bit as steps give it."""
    following = gen._run.drafted[draft]
    histories = [prompt + row for prompt, row in zip(gen._run.prompts, gen._run.tokens, strict=True)]
    backend, params = draft.model.backend, draft.model.params
    assert following.fed is None
    for held, history in zip(following.held, histories, strict=True):
        assert len(history) - 2 <= len(held) <= len(history) - 1 and held == history[: len(held)]
    state = backend.init(params, batch=len(histories), capacity=following.capacity)
    lengths = [len(held) for held in following.held]
    rows = np.array([held + [0] * (max(lengths) - len(held)) for held in following.held])
    wanted, _ = sc.extend(backend, params, state, rows, num_valid=lengths)
    assert sc.equal(backend, following.state, wanted)
    return lengths


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_f13_f15_a_drafts_state_holds_what_was_emitted(draft):
    """F13 F15: after rejections and after windows accepted whole, positions are contiguous."""
    # Penalties that the draft knows nothing of make it wrong now and then.
    sampler = sc.Sampler() if draft is DRAFTS["right"] else sc.Sampler(frequency_penalty=0.3)
    plain = start(sampler=sampler, max_tokens=NUM).run(NUM)
    gen = start(sampler=sampler, max_tokens=NUM)
    while gen.num_left:
        gen.run(min(draft.num_draft + 1, gen.num_left), speculate=draft)
        if draft in gen._run.drafted:
            held_by(gen, draft)
    assert gen.tokens == plain
    rate = gen.speculation.num_accepted / gen.speculation.num_drafted
    assert rate == 1 if draft is DRAFTS["right"] else 0 < rate < 1


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["digit", "digit-own"])
def test_greedy_output_is_plain_decodings(name, batch):
    """Integer states, a ring in draft and target; the draft has the same planes."""
    prompt = [[1, 2, 3, 4], [5, 6], [7], [8, 9, 1]][:batch]
    gen, plain = (start(name, batch=batch, prompt=prompt, max_tokens=NUM) for _ in range(2))
    assert gen.run(NUM, speculate=ModelDraft(model=model(name), num_draft=3)) == plain.run(NUM)
    assert sc.equal(cases()[name].backend, gen.runtime.state, plain.runtime.state)


def test_the_noise_of_plain_draws_gives_its_tokens():
    """`same`: token for token, and models that agree accept everything."""
    plain = start(sampler=WARM, seed=3, max_tokens=NUM).run(NUM)
    for found, least in ((model("decay"), 1.0), (other(), 0.3)):
        gen = start(sampler=WARM, seed=3, max_tokens=NUM)
        assert gen.run(NUM, speculate=ModelDraft(model=found, acceptance="same")) == plain
        assert gen.speculation.num_accepted >= least * gen.speculation.num_drafted


@pytest.mark.slow
def test_sampled_output_is_distributed_as_plain_draws():
    """Chi-square over many sequences of one prompt, the second token given the first."""
    batch, sampler = 600, sc.Sampler(temperature=1.3, top_k=6)
    gen = start(batch=batch, prompt=[[1, 2, 3]] * batch, sampler=sampler, seed=5, max_tokens=4)
    gen.run(3, speculate=ModelDraft(model=other(shift=0.5), num_draft=2))
    assert 0.2 < gen.speculation.num_accepted / gen.speculation.num_drafted < 0.95
    tokens = np.array(gen.tokens)
    case = cases()["decay"]
    state = case.backend.init(case.params, batch=1, capacity=8)
    state, logits = sc.extend(case.backend, case.params, state, [[1, 2, 3]], logits="last")
    assert p_value(np.bincount(tokens[:, 0], minlength=16), _kept(logits[0], sampler) * batch) > 0.001
    first = int(np.bincount(tokens[:, 0]).argmax())
    here = tokens[tokens[:, 0] == first, 1]
    _, logits = sc.step(case.backend, case.params, state, [first])
    assert len(here) > 80 and p_value(np.bincount(here, minlength=16), _kept(logits[0], sampler) * len(here)) > 0.001


def _kept(logits, sampler) -> np.ndarray:
    scaled = np.array(logits) / sampler.temperature
    scaled[np.argsort(scaled)[: -sampler.top_k]] = -np.inf
    return np.array(jax.nn.softmax(scaled))


@pytest.mark.parametrize("sampler", [sc.Sampler(), WARM], ids=["greedy", "sampled"])
def test_f65_a_restored_run_repeats_itself_with_its_draft(sampler):
    """F65 NF3 NF6: the draft's state is saved, restored, forked and exchanged with the run, in one record."""
    draft = DRAFTS["other"]
    gen = start(sampler=sampler, seed=2, max_tokens=40)
    gen.run(7, speculate=draft)
    before = gen.estimate()
    snap = gen.snapshot()
    held = [list(row) for row in snap.run.drafted[draft].held]
    first = gen.run(12, speculate=draft)
    child = gen.fork(snap)
    gen.restore(snap)
    assert gen.run(12, speculate=draft) == first
    gen.exchange(child)
    assert gen.run(12, speculate=draft) == first
    gen.exchange(child)
    assert gen.run(5, speculate=draft)
    assert snap.run.drafted[draft].held == held
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(snap.run.drafted[draft].state))
    assert before is not None and before.copy_bytes >= snap.run.drafted[draft].nbytes > 0


@settings(max_examples=6)
@given(
    turns=st.lists(
        st.tuples(st.sampled_from([None, "ngram", "other", "right"]), st.integers(1, 7)), min_size=2, max_size=6
    )
)
def test_any_mix_of_drafts_and_plain_steps_is_plain_decoding(turns):
    plain = start(max_tokens=48)
    gen = start(max_tokens=48)
    for name, num_tokens in turns:
        draft = NGramDraft(num_draft=4, min_ngram=1) if name == "ngram" else None if name is None else DRAFTS[name]
        assert gen.run(num_tokens, speculate=draft) == plain.run(num_tokens)
    assert sc.equal(cases()["decay"].backend, gen.runtime.state, plain.runtime.state)


def test_a_round_that_fails_costs_the_drafts_state_alone(monkeypatch):
    from statecore.generation import _speculate

    draft, plain = DRAFTS["other"], start(max_tokens=NUM).run(NUM)
    gen = start(max_tokens=NUM)
    gen.run(5, speculate=draft)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(_speculate, "draw_rows", fail)
        with pytest.raises(MemoryError):
            gen.run(5, speculate=draft)
    gen.run(NUM - len(gen.tokens[0]), speculate=draft)
    assert gen.tokens == plain


def test_what_a_draft_cannot_do_is_refused_before_anything_runs():
    gen = start(max_tokens=8)
    state, run = gen.runtime.state, gen._run
    digit = model("digit")
    cases_ = [
        (ModelDraft(model=digit), sc.GeometryError, "10 tokens"),
        (ModelDraft(model=model("decay"), num_draft=0), sc.UnsupportedError, "at least one"),
        (ModelDraft(model=model("decay"), acceptance="hope"), sc.UnsupportedError, "hope"),
        (ModelDraft(model=3), sc.LoadError, "int"),  # pyright: ignore[reportArgumentType]
        (SelfDraft(model=model("decay"), skip=(0,)), sc.UnsupportedError, "one piece"),
    ]
    for draft, error, words in cases_:
        with pytest.raises(error, match=words):
            gen.run(4, speculate=draft)
    ring = start("digit", max_tokens=8)
    short = sc.load((testing.digit_backend(ring_rows=6), None))
    with pytest.raises(sc.RollbackError, match="draft model"):
        ring.run(4, speculate=ModelDraft(model=short, num_draft=3))
    lossless = start(max_tokens=8, lossless=True)
    with pytest.raises(sc.UnsupportedError, match="not"):
        lossless.run(4, speculate=ModelDraft(model=model("decay"), acceptance="typical"))
    assert gen.runtime.state is state and gen._run is run and gen.tokens == [[], []]


@pytest.mark.slow
def test_a_model_of_layers_guesses_for_itself(tiny):
    """Self-speculation: the same parameters, a state of its own, plain decoding's tokens."""
    options = {"max_tokens": 24, "lossless": True}
    gen, plain = (sc.Generation(sc.Runtime(tiny, capacity=64), "HAMLET.\nTo ", **options) for _ in range(2))
    draft = SelfDraft(model=tiny, skip=(1,), num_draft=3)
    assert gen.run(24, speculate=draft) == plain.run(24)
    assert gen.speculation.num_accepted > 0
    assert draft.thinned.model.params["embed"] is tiny.params["embed"]
    assert tiny.layers is not None
    for skip, error in (((9,), sc.GeometryError), (tuple(range(tiny.layers.num_layers)), sc.UnsupportedError)):
        with pytest.raises(error):
            tiny.without_layers(skip)


class Nothing:
    """A constraint that forbids every token and is never complete."""

    is_complete = False

    def mask(self):
        return np.zeros(16, bool)

    def copy(self):
        return self

    def advance(self, token):
        raise AssertionError(token)

    def nbytes(self):
        return 0


def test_a_constraint_that_forbids_everything_is_refused_before_a_window_is_read():
    for draft in (ModelDraft(model=model("decay"), num_draft=2), NGramDraft(min_ngram=1)):
        gen = start(batch=1, prompt=[3, 3, 3, 3], max_tokens=8, constraint=Nothing())
        state = gen.runtime.state
        with pytest.raises(sc.UnsupportedError, match="allows no token"):
            gen.run(4, speculate=draft)
        assert gen.runtime.state is state and gen.tokens == []


def test_drafts_stop_at_the_limit_and_the_capacity():
    """A window is never longer than what may still be emitted; a state that is nearly full takes it."""
    for draft in (ModelDraft(model=model("decay"), num_draft=6), NGramDraft(num_draft=6, min_ngram=1, worth=0.0)):
        gen, plain = (start(capacity=10, prompt=[[1, 2, 3], [4]]) for _ in range(2))
        assert gen.run(20, speculate=draft) == plain.run(20)
        assert gen.num_left == 0 and gen.runtime.lengths.max() == 10

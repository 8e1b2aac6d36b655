"""Generations on the toys: prompts, samplers, snapshots, forks, speculation, limits."""

import itertools

import jax
import numpy as np
import pytest
from helpers import assert_bits, cases, host
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore.generation import CHUNK_LENGTHS, choose

CAPACITY = 96


def start(name="decay", *, batch=2, capacity=CAPACITY, prompt=..., **options) -> sc.Generation:
    case = cases()[name]
    runtime = sc.Runtime(sc.load((case.backend, case.params)), batch=batch, capacity=capacity)
    prompt = [[1, 2, 3, 4], [5, 6]][:batch] if prompt is ... else prompt
    return sc.Generation(runtime, prompt, **options)


WARM = sc.Sampler(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01)
SAMPLERS = {"greedy": sc.Sampler(), "sampled": WARM}
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


@by_sampler
def test_tokens_are_what_plain_transitions_give(sampler):
    case, gen = cases()["decay"], start(sampler=sampler, seed=3)
    got = gen.run(6)
    state = case.backend.init(case.params, batch=2, capacity=CAPACITY)
    state, _ = sc.extend(case.backend, case.params, state, [[1, 2, 3], [5, 0, 0]], num_valid=[3, 1])
    pending, wanted = np.array([4, 6]), []
    for index in range(6):
        state, logits = sc.step(case.backend, case.params, state, pending)
        indices = np.full((2, 1), index)
        pending = np.array(choose(sampler, jax.random.key(3), indices, logits[:, None]))[:, 0]
        wanted.append(pending.tolist())
    assert got == [list(row) for row in zip(*wanted, strict=True)]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 40])
def test_prompts_of_any_length_are_fed_exactly(length):
    prompt = [(7 * i + 1) % 16 for i in range(length)]
    case, gen = cases()["decay"], start(batch=1, prompt=prompt)
    state = case.backend.init(case.params, capacity=CAPACITY)
    state, _ = sc.extend(case.backend, case.params, state, np.array([prompt[:-1]], int).reshape(1, -1))
    assert sc.equal(case.backend, gen.runtime.state, state)


def test_prompts_cost_one_compile_a_chunk_length():
    case = cases()["decay"]
    functions, planes = case.backend.functions, case.backend.planes
    backend = sc.Backend(name="fresh", init=functions.init, step=functions.step, planes=planes)
    model = sc.load((backend, case.params))
    for length in (1, 2, 9, 17, 33, 61, 150, 300):
        sc.Generation(sc.Runtime(model, capacity=320), [1] * length, max_tokens=1)
    compiled = sum(run._cache_size() for key, run in backend.compiled.items() if key[0] == "extend")
    assert compiled == len(CHUNK_LENGTHS)


@by_sampler
def test_a_restored_run_repeats_itself(sampler):
    gen = start(sampler=sampler, max_tokens=60)
    gen.run(3)
    snap = gen.snapshot()
    before = host(snap.slot.state)
    first = gen.run(9)
    for _ in range(2):
        gen.restore(snap)
        assert gen.run(9) == first
    assert_bits(before, snap.slot.state)


@by_sampler
@given(data=st.data())
def test_law_7_forks_interleaved_in_any_order_equal_each_alone(sampler, data):
    seeds = [None, 5, 6]
    alone = []
    for seed in seeds:
        gen = start(sampler=sampler, seed=1, max_tokens=40)
        gen.run(2)
        branch = gen.fork(gen.snapshot(), seed=seed)
        gen.exchange(branch)
        gen.run(8)
        alone.append(gen.tokens)
    gen = start(sampler=sampler, seed=1, max_tokens=40)
    gen.run(2)
    snap = gen.snapshot()
    branches = [gen.fork(snap, seed=seed) for seed in seeds]
    turns = data.draw(st.permutations([i for i in range(3) for _ in range(4)]))
    for turn in turns:
        gen.exchange(branches[turn])
        gen.run(2)
        gen.exchange(branches[turn])
    assert [branch.tokens for branch in branches] == alone
    assert gen.tokens == snap.tokens


class ListDraft:
    """Guesses from a list of booleans: right or wrong, position after position."""

    def __init__(self, text: list[list[int]], prompts: list[list[int]], rights: list[bool], num_draft: int):
        self.known = [prompt + row for prompt, row in zip(prompts, text, strict=True)]
        self.rights, self.num_draft = itertools.cycle(rights), num_draft

    def propose(self, history, limit):
        (known,) = [row for row in self.known if row[: len(history)] == list(history)]
        guesses = known[len(history) : len(history) + limit]
        return [token if next(self.rights) else (token + 1) % 10 for token in guesses]


PROMPTS = [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize("name", ["digit", "digit-own", "decay"])
@by_sampler
@given(rights=st.lists(st.booleans(), min_size=1, max_size=9), num_draft=st.sampled_from([4]))
def test_speculation_changes_no_token(name, sampler, rights, num_draft):
    """Drafts right and wrong in any pattern, rows that accept different counts."""
    plain = start(name, sampler=sampler, seed=2, max_tokens=20)
    text = plain.run(20)
    gen = start(name, sampler=sampler, seed=2, max_tokens=20)
    draft = ListDraft(text, PROMPTS, rights, num_draft)
    assert [a + b for a, b in zip(gen.run(13, speculate=draft), gen.run(7), strict=True)] == text
    assert gen.tokens == plain.tokens
    # The last token is pending in both, so the states are the same too.
    assert gen.runtime.lengths.tolist() == plain.runtime.lengths.tolist() == [3 + 20, 1 + 20]
    assert sc.equal(cases()[name].backend, gen.runtime.state, plain.runtime.state)


def test_a_draft_that_is_always_right_accepts_all():
    text = start("digit", max_tokens=20).run(20)
    gen = start("digit", max_tokens=20)
    gen.run(20, speculate=ListDraft(text, PROMPTS, [True], 4))
    assert gen.speculation.tokens_per_verify == 5.0
    assert (gen.speculation.num_drafted, gen.speculation.num_accepted) == (32, 32)


def test_a_draft_whose_first_token_is_wrong_accepts_none():
    text = start("digit", max_tokens=12).run(12)
    gen = start("digit", max_tokens=12)
    assert gen.run(12, speculate=ListDraft(text, PROMPTS, [False], 4)) == text
    assert gen.speculation.num_accepted == 0


def test_ngram_drafts():
    draft = sc.NGramDraft(num_draft=3)
    assert draft.propose([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert draft.propose([1, 2, 8, 1, 2, 9, 1, 2], 1) == [9]
    assert draft.propose([1, 2, 5, 0, 2, 6, 1, 2], 2) == [5, 0]
    assert draft.propose([7, 7, 7], 3) == [7, 7, 7]
    assert draft.propose([5, 1, 2, 1, 2], 3) == [1, 2, 1]
    assert draft.propose([1, 2, 3, 4], 3) == []
    assert draft.propose([1], 3) == [] and draft.propose([], 3) == []


@given(history=st.lists(st.integers(0, 2), max_size=30), limit=st.integers(1, 5))
def test_ngram_drafts_by_definition(history, limit):
    """Against the definition, written out: the longest suffix, its latest earlier place, and over again."""
    wanted = []
    for size in range(min(8, len(history) - 1), 1, -1):
        places = [i for i in range(len(history) - size) if history[i : i + size] == history[-size:]]
        if places:
            wanted = list(itertools.islice(itertools.cycle(history[places[-1] + size :]), limit))
            break
    assert sc.NGramDraft().propose(history, limit) == wanted


# Samplers.


def draws(sampler, logits, count=4000):
    logits = np.broadcast_to(np.array(logits, np.float32), (1, count, len(logits)))
    tokens = np.array(choose(sampler, jax.random.key(0), np.arange(count)[None], jax.numpy.array(logits)))[0]
    return np.bincount(tokens, minlength=logits.shape[-1]) / count


def test_sampling_follows_the_distribution():
    logits = [0.0, 1.0, 2.0, -1.0]
    wanted = np.exp(np.array(logits) / 0.7)
    np.testing.assert_allclose(draws(sc.Sampler(temperature=0.7), logits), wanted / wanted.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("sampler", "kept"),
    [
        (sc.Sampler(temperature=1.0, top_k=2), [1, 2]),
        (sc.Sampler(temperature=1.0, top_p=0.6), [2]),
        (sc.Sampler(temperature=1.0, top_p=0.8), [1, 2]),
        (sc.Sampler(temperature=1.0, min_p=0.1), [0, 1, 2]),
        (sc.Sampler(temperature=1.0, top_k=1), [2]),
        (sc.Sampler(), [2]),
    ],
)
def test_samplers_keep_what_they_say(sampler, kept):
    """Probabilities 0.09, 0.24, 0.64, 0.03."""
    assert np.flatnonzero(draws(sampler, [0.0, 1.0, 2.0, -1.0])).tolist() == kept


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-46},
        {"top_k": 2.5},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
    ],
)
def test_samplers_that_mean_nothing_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(sc.UnsupportedError, match=name):
        start(sampler=sc.Sampler(**wrong))


# Bad input and the rules of a generation.


def test_bad_prompts():
    for prompt, error in (
        ("text", sc.GeometryError),
        ([[1, 2], "text"], sc.UnsupportedError),
        ([[1, 2], []], sc.GeometryError),
        ([[1, 2]], sc.GeometryError),
        ([[1, 2], [16]], sc.GeometryError),
        ([1, 2, 3], sc.GeometryError),
        ([[1.9, 2.2], [3]], sc.GeometryError),
        ([["1"], ["2"]], sc.GeometryError),
        ([[True], [2]], sc.GeometryError),
        ([[[1]], [[2]]], sc.GeometryError),
        (None, sc.GeometryError),
    ):
        with pytest.raises(error):
            start(prompt=prompt)


def test_a_refused_prompt_leaves_the_runtime_as_it_was():
    gen = start()
    gen.run(3)
    before = host(gen.runtime.state)
    for options in ({"prompt": [[1, 2], [16]]}, {"prompt": [[1], [2]], "max_tokens": CAPACITY + 1}):
        prompt = options.pop("prompt")
        with pytest.raises(sc.StateError):
            sc.Generation(gen.runtime, prompt, **options)
    assert_bits(before, gen.runtime.state)
    gen.run(2)


def test_capacity_is_kept_to_the_last_token():
    gen = start(capacity=8, batch=1, prompt=[1, 2, 3])
    assert gen.num_left == 6
    assert len(gen.run(100)) == 6
    with pytest.raises(sc.LifecycleError, match="complete"):
        gen.step()
    with pytest.raises(sc.CapacityError, match="capacity of 9"):
        start(capacity=8, batch=1, prompt=[1, 2, 3], max_tokens=7)
    with pytest.raises(sc.CapacityError, match="at least 1"):
        start(max_tokens=0)
    with pytest.raises(sc.LifecycleError, match="at least 1"):
        start().run(0)


def test_drafts_that_cannot_be_undone_are_refused():
    gen = start("digit")
    before = host(gen.runtime.state)
    with pytest.raises(sc.RollbackError, match="windows of 10"):
        gen.run(4, speculate=sc.NGramDraft(num_draft=9))
    with pytest.raises(sc.UnsupportedError):
        gen.run(4, speculate=sc.NGramDraft(num_draft=0))
    assert_bits(before, gen.runtime.state)


def test_a_window_is_closed_when_something_fails_inside_it(monkeypatch):
    gen, plain = start("digit", max_tokens=12), start("digit", max_tokens=12).run(12)
    draft = ListDraft(plain, PROMPTS, [True], 4)
    gen.run(2)
    from statecore.generation import _speculate

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_speculate, "draw_rows", fail)
        with pytest.raises(KeyboardInterrupt):
            gen.run(5, speculate=draft)
    gen.run(10, speculate=draft)
    assert gen.tokens == plain


def test_a_runtime_driven_by_others_is_noticed():
    gen = start(max_tokens=20)
    snap = gen.snapshot()
    branch = gen.fork(snap)
    gen.runtime.step([1, 2])
    for call in (gen.step, gen.snapshot, lambda: gen.exchange(branch)):
        with pytest.raises(sc.LifecycleError, match="Something else"):
            call()
    gen.restore(snap)  # replaces the whole state, so it mends this
    gen.step()
    other = sc.Generation(gen.runtime, [[1], [2]], max_tokens=4)
    for call in (gen.step, lambda: gen.restore(snap), lambda: gen.fork(snap)):
        with pytest.raises(sc.LifecycleError, match="Another generation"):
            call()
    other.step()


def test_snapshots_of_others_are_refused():
    gen, other = start(max_tokens=20), start(max_tokens=20)
    snap = gen.snapshot()
    for call in (lambda: other.restore(snap), lambda: other.fork(snap), lambda: other.exchange(gen.fork(snap))):
        with pytest.raises(sc.IdentityError):
            call()
    branch = gen.fork(snap)
    gen.exchange(branch)
    with pytest.raises(sc.IdentityError, match="another branch"):
        gen.restore(snap)


def test_limits():
    gen = start(max_tokens=20)
    cost = gen.runtime.estimate()
    gen.enable_snapshots(sc.SnapshotLimits(max_snapshots=2, max_branches=1, cumulative_copy_bytes=5 * cost.copy_bytes))
    with pytest.raises(sc.LifecycleError):
        gen.enable_snapshots(sc.SnapshotLimits())
    snaps = [gen.snapshot(), gen.snapshot()]
    used = gen.usage
    with pytest.raises(sc.BudgetError, match="snapshot count"):
        gen.snapshot()
    assert gen.usage == used
    branch = gen.fork(snaps[0])
    with pytest.raises(sc.BudgetError, match="branch count"):
        gen.fork(snaps[0])
    snaps.pop()
    assert (gen.usage.snapshots, gen.usage.branches) == (1, 1)
    gen.restore(snaps[0])
    assert gen.usage.cumulative_copy_bytes == 4 * cost.copy_bytes
    gen.snapshot()
    with pytest.raises(sc.BudgetError, match="cumulative copy bytes"):
        gen.snapshot()
    del branch
    assert gen.usage.branches == 0
    # A restored run is not rewound in what it has copied.
    assert gen.usage.cumulative_copy_bytes == 5 * cost.copy_bytes


def test_retained_bytes_move_with_the_branch():
    gen = start(max_tokens=20)
    gen.enable_snapshots(sc.SnapshotLimits())
    branch = gen.fork(gen.snapshot())
    held = gen.usage.retained_bytes
    gen.exchange(branch)
    del branch  # it holds the root, which costs nothing
    assert (gen.usage.retained_bytes, gen.usage.branches) == (held, 1)


@by_sampler
def test_an_interrupted_run_goes_on(monkeypatch, sampler):
    """An interrupt between a step and its draw loses nothing: the next call draws from that step's logits."""
    from statecore.generation import _round

    gen = start(sampler=sampler, max_tokens=20)
    gen.run(2)
    snap, wanted = gen.snapshot(), gen.run(6)
    gen.restore(snap)

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_round, "draw_rows", fail)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                gen.run(6)
    between = gen.snapshot()
    assert gen.run(6) == wanted
    for saved in (between, snap):
        gen.restore(saved)
        assert gen.run(6, speculate=sc.NGramDraft(num_draft=3)) == wanted


@by_sampler
def test_a_run_whose_books_were_cut_short_is_mended_by_a_restore(monkeypatch, sampler):
    """The state has moved and the text has not: everything but a restore is refused."""
    from statecore.generation import _round

    gen = start(sampler=sampler, max_tokens=20)
    gen.run(2)
    snap, wanted = gen.snapshot(), gen.run(6)
    gen.restore(snap)

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_round, "take", fail)
        with pytest.raises(KeyboardInterrupt):
            gen.run(6)
    with pytest.raises(sc.LifecycleError, match="cut short"):
        gen.step()
    gen.restore(snap)
    assert gen.run(6) == wanted


def test_seeds():
    key = jax.random.key(5)
    texts = [start(sampler=WARM, seed=seed, max_tokens=9).run(9) for seed in (5, np.int64(5), key, 6)]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    for seed in (1.5, None, 2**70, "5", jax.random.split(key, 2), jax.random.PRNGKey(5)):
        with pytest.raises(sc.UnsupportedError, match="seed"):
            start(sampler=WARM, seed=seed)
    for wrong in (2.5, "3"):
        with pytest.raises(sc.StateError):
            start(max_tokens=wrong)
        with pytest.raises(sc.LifecycleError):
            start().run(wrong)


class ArrayDraft:
    """Guesses as an array, of a dtype that may be wrong."""

    num_draft = 3

    def __init__(self, dtype):
        self.dtype = dtype

    def propose(self, history, limit):
        return np.array([1, 2, 3], self.dtype)


def test_drafts_may_be_arrays_of_integers():
    plain = start(max_tokens=9).run(9)
    assert start(max_tokens=9).run(9, speculate=ArrayDraft(np.int64)) == plain
    with pytest.raises(sc.GeometryError, match="draft"):
        start(max_tokens=9).run(9, speculate=ArrayDraft(np.float32))

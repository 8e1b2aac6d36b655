"""Prefix caches and boundary rollback in a running generation."""

import numpy as np
import pytest
from generations import PROMPTS, WARM, Letters, alone, model, start
from helpers import assert_bits, cases, host

import statecore as sc
from statecore import ssm
from statecore.generation import Finish, LoopGuard
from statecore.ssm import Decline

MASK = ssm.boundary_mask(Letters(), 16)


def cache_of(loaded, **options):
    return sc.PrefixCache(loaded.backend, loaded.params, capacity=96, **options)


@pytest.mark.parametrize("name", ["digit", "decay"])
def test_a_second_turn_reuses_the_first(name):
    """Prompt and answer are kept, so the next turn reads only what is new, and its tokens are the same."""
    loaded = model(name)
    cache = cache_of(loaded)
    first = sc.Generation(sc.Runtime(loaded, capacity=96), [1, 2, 3, 4, 5], prefix_cache=cache, max_tokens=20)
    assert first.warm.num_reused == [0]
    answer = first.run(9)
    turn = [1, 2, 3, 4, 5, *answer, 7, 8]
    cold = sc.Generation(sc.Runtime(loaded, capacity=96), turn, max_tokens=20)
    warm = sc.Generation(sc.Runtime(loaded, capacity=96), turn, prefix_cache=cache, max_tokens=20)
    assert warm.warm.num_reused == [5 + 9 - 1]  # the last token of the answer was pending
    assert sc.equal(loaded.backend, warm.runtime.state, cold.runtime.state)
    assert warm.run(12) == cold.run(12)


def test_each_row_of_a_batch_reuses_its_own():
    loaded = model()
    cache = cache_of(loaded)
    texts = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
    for text in texts:
        sc.Generation(sc.Runtime(loaded, capacity=96), text, prefix_cache=cache, max_tokens=4)
    prompts = [[*texts[1], 4, 4], [*texts[0], 1]]
    cold = sc.Generation(sc.Runtime(loaded, batch=2, capacity=96), prompts, max_tokens=8)
    warm = sc.Generation(sc.Runtime(loaded, batch=2, capacity=96), prompts, prefix_cache=cache, max_tokens=8)
    assert warm.warm.num_reused == [2, 5]
    assert warm.run(8) == cold.run(8)


def test_long_answers_are_kept_while_decoding():
    """S36: at the planned places, by the true token count, windows or not."""
    loaded = model()
    cache = cache_of(loaded, block_size=4, interval=2)
    gen = sc.Generation(sc.Runtime(loaded, capacity=96), [1, 2, 3], prefix_cache=cache, max_tokens=60)
    for _ in gen.stream(30, speculate=sc.NGramDraft(num_draft=3)):
        pass
    text = [1, 2, 3, *gen.tokens]
    lengths = sorted(entry.num_tokens for entry in cache._tree)
    assert len(lengths) >= 3 and all(text[:length] for length in lengths)
    for length in lengths:
        hit = cache.lookup(text[:length], max_tokens=length)
        state = cache.restore(loaded.backend.init(loaded.params, batch=1, capacity=96), 0, hit)
        plain = loaded.backend.init(loaded.params, batch=1, capacity=96)
        plain, _ = sc.extend(loaded.backend, loaded.params, plain, [text[:length]])
        assert sc.equal(loaded.backend, state, plain)


def test_caches_of_others_are_refused_before_anything_moves():
    loaded, other = model(), model("digit")
    gen = sc.Generation(sc.Runtime(loaded, capacity=96), [1, 2], max_tokens=4)
    before = host(gen.runtime.state)
    small = sc.PrefixCache(loaded.backend, loaded.params, capacity=64)
    for cache, error in ((cache_of(other), sc.IdentityError), (small, sc.GeometryError)):
        with pytest.raises(error):
            sc.Generation(gen.runtime, [1, 2], prefix_cache=cache)
    assert_bits(before, gen.runtime.state)
    gen.run(2)


def test_a_cache_that_is_full_of_leases_fails_no_request():
    """S43: nothing is kept, the reason is told, and the text is what it would be."""
    loaded = model()
    cache = cache_of(loaded, num_slots=1)
    sc.Generation(sc.Runtime(loaded, capacity=96), [5, 5, 5], prefix_cache=cache, max_tokens=2)
    with cache.lease(cache.lookup([5, 5, 5, 5])):
        gen = sc.Generation(sc.Runtime(loaded, capacity=96), PROMPTS[0], prefix_cache=cache, max_tokens=6)
        assert gen.run(6) == alone(0, max_tokens=6).run(6)
        assert "leased" in gen.warm.note


# Boundaries.


def looping(**options):
    """Returns a generation forced into `ab.` and then `ef`, with its boundaries saved."""
    gen = alone(0, sampler=WARM, seed=1, max_tokens=60, boundaries=MASK, boundary_slots=12, **options)
    for letter in "ab.cd.ef":
        gen.force(Letters().encode(letter)[0])
        gen.step()
    return gen


def test_s29_going_back_to_a_boundary():
    """S29: at least `min_keep` tokens dropped, state and history as after the boundary, more to emit, twice at most."""
    gen = looping()
    case = cases()["decay"]
    decision = gen.rollback_to_boundary(1)
    assert (decision.keep, decision.dropped) == (6, 2) and gen.text == "ab.cd."
    assert gen.num_left == 54
    fresh = alone(0, sampler=WARM, seed=1, max_tokens=60)
    for letter in "ab.cd.":
        fresh.force(Letters().encode(letter)[0])
        fresh.step()
    assert sc.equal(case.backend, gen.runtime.state, fresh.runtime.state)
    assert gen.run(8) != fresh.run(8)  # drawn anew, or the loop would come again
    before = gen.tokens
    assert gen.rollback_to_boundary(len(before) - 5).keep == 3 and gen.text == "ab."
    gen.run(4)
    state = host(gen.runtime.state)
    declined = gen.rollback_to_boundary(1)
    assert declined.decline is Decline.CAP_REACHED
    assert_bits(state, gen.runtime.state)


def test_s29_reasons_to_decline():
    gen = looping()
    assert gen.rollback_to_boundary(100).decline is Decline.NO_BOUNDARY
    list(gen.stream(2))
    assert gen.rollback_to_boundary(1).decline is Decline.STREAM_UNSAFE
    unsaved = alone(0, max_tokens=20, boundaries=MASK)
    unsaved.run(6)
    assert unsaved.rollback_to_boundary(1).decline is Decline.NO_SNAPSHOT
    with pytest.raises(sc.UnsupportedError, match="boundaries"):
        alone(0, max_tokens=20).rollback_to_boundary(1)
    with pytest.raises(sc.UnsupportedError, match="one text"):
        start(boundaries=MASK)
    with pytest.raises(sc.GeometryError, match="mask"):
        alone(0, boundaries=np.ones(3, bool))


def test_saved_boundaries_are_part_of_a_snapshot():
    gen = looping()
    snap = gen.snapshot()
    gen.rollback_to_boundary(1)
    gen.restore(snap)
    assert gen.text == "ab.cd.ef" and gen.rollback_to_boundary(1).keep == 6


def test_a_guard_breaks_a_loop_or_ends_the_text():
    """The loop is cut at a boundary twice; what loops still is ended, and says so."""
    bias = {letter: -100.0 for letter in range(16) if letter not in (0, 14)}
    loops = sc.Sampler(temperature=1.0, logit_bias=bias | {0: 100.0})
    gen = looping(guard=LoopGuard(max_period=3, num_repeats=4))
    gen.override(logit_bias=loops.logit_bias)
    gen.run(40)
    assert gen.finish is Finish.LOOP and gen.text.startswith("ab.") and gen._run.num_rollbacks == 2
    free = alone(0, max_tokens=40, sampler=loops, guard=LoopGuard(max_period=3, num_repeats=4))
    free.run(40)
    assert free.finish is Finish.LOOP and free.text == "aaaa"


@pytest.mark.parametrize(("output", "period"), [("abcabcabc", 3), ("xaaa", 1), ("abab", None), ("", None)])
def test_periods(output, period):
    assert LoopGuard(max_period=4, num_repeats=3).period(list(output)) == period

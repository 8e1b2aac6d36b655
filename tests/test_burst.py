"""Several tokens in one call: the tokens, the state and the sampler of one call a token."""

import jax
import numpy as np
import pytest
from generations import WARM, start
from helpers import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from test_branching import SAMPLERS

import statecore as sc
from statecore.generation._burst import BURST


def one_by_one(gen, num_tokens):
    """Emits by plain rounds: a call of fewer tokens than a burst has none."""
    while num_tokens and gen.num_left:
        gen.run(1)
        num_tokens -= 1
    return gen


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", [pytest.param("digit", marks=pytest.mark.slow), "decay"])
@settings(max_examples=8)
@given(num_tokens=st.integers(BURST, 3 * BURST + 1), stop=st.sampled_from([None, 0, 3, 7]))
def test_a_burst_has_the_bits_of_single_tokens(name, sampler, num_tokens, stop):
    """Rows that stop inside a burst, limits inside one, and everything that the sampler carries."""
    options = {"sampler": sampler, "seed": 3, "max_tokens": 2 * BURST + 3, "num_logprobs": 2}
    if stop is not None:
        options["stop_tokens"] = [stop]
    gen, plain = start(name, **options), one_by_one(start(name, **options), num_tokens)
    gen.run(num_tokens)
    assert gen.tokens == plain.tokens and gen.finish == plain.finish and gen.status is plain.status
    assert gen.runtime.lengths.tolist() == plain.runtime.lengths.tolist()
    assert sc.equal(cases()[name].backend, gen.runtime.state, plain.runtime.state)
    assert gen.logprobs == plain.logprobs and gen.top_logprobs == plain.top_logprobs
    for one, other in zip(jax.tree.leaves(gen._run.sampling), jax.tree.leaves(plain._run.sampling), strict=True):
        if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [sc.Sampler(), WARM], ids=["greedy", "sampled"])
def test_a_burst_of_the_embedded_model(tiny, sampler):
    """Bit for bit too: the same step, in a scan and in a call of its own."""
    options = {"sampler": sampler, "seed": 1, "max_tokens": 60}
    gen, plain = (sc.Generation(sc.Runtime(tiny, capacity=128), "HAMLET.\nTo ", **options) for _ in range(2))
    gen.run(30)
    one_by_one(plain, 30)
    assert gen.text == plain.text
    assert sc.equal(tiny.backend, gen.runtime.state, plain.runtime.state)


def test_logits_that_are_not_finite_are_refused_and_mended():
    """The state has moved, so all but a restore is refused, as after a plain round."""
    case = cases()["decay"]
    bad = jax.tree.map(lambda leaf: leaf * np.nan, case.params)
    runtime = sc.Runtime(sc.load((case.backend, bad)), capacity=64)
    gen = sc.Generation(runtime, [1, 2, 3], max_tokens=40)
    snap = gen.snapshot()
    with pytest.raises(sc.NonFiniteError):
        gen.run(BURST)
    with pytest.raises(sc.LifecycleError, match="cut short"):
        gen.step()
    gen.restore(snap)
    with pytest.raises(sc.NonFiniteError):
        gen.step()

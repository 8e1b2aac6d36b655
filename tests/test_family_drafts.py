"""Every family: greedy output with drafts of each kind is plain decoding's, batch 1 and 4."""

import numpy as np
import pytest
from families import NAMES, fixture
from test_windows import OnHost

import statecore as sc
from statecore.speculative import ModelDraft, NGramDraft, SelfDraft

pytestmark = pytest.mark.slow

NUM = 20


class Wrong:
    """Guesses that nothing is ever right of, for more than a token by chance."""

    num_draft, worth = 3, 0.0

    def propose(self, history, limit):
        return [(history[-1] + 1) % 7] * limit


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_speculation_is_plain_decoding(name, batch):
    model = fixture(name).model
    lookup = NGramDraft(num_draft=3, min_ngram=1, worth=0.0)
    drafts = [lookup, OnHost(lookup), Wrong(), ModelDraft(model=model, num_draft=3)]
    if model.layers is not None and model.layers.num_layers > 1:
        drafts.append(SelfDraft(model=model, skip=(model.layers.num_layers - 1,), num_draft=3))
    prompts = [np.random.default_rng(row).integers(0, 60, 5 + row).tolist() * 2 for row in range(batch)]
    runtime = sc.Runtime(model, batch=batch, capacity=64)
    outputs = []
    for draft in (None, *drafts):
        gen = sc.Generation(runtime, prompts, max_tokens=NUM, lossless=True)
        gen.run(NUM, speculate=draft)
        outputs.append(gen.tokens)
    assert all(output == outputs[0] for output in outputs[1:])
    assert gen.speculation.mode == "exact"

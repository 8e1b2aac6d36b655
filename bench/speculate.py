"""Speculative decoding: n-gram drafts on text that repeats and on prose, windows against steps, both loops.

Run it alone with `python bench/speculate.py`, or with the others by `python -m bench`. SmolLM2-135M is
measured too where `make real` has put its weights.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import statecore as sc
from bench.harness import Case, Fact, Record, Timing, compare
from bench.spine import Sizes, tiny_model
from statecore.speculative import probe_parity

_REAL = Path(__file__).parent.parent / ".cache" / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_CAPACITY = 512
_NUM_DRAFT = 7
_TEXTS = {
    "repeating": "ROMEO.\nA rose, a rose, a rose, a rose, a rose, a rose, a rose, a rose, a rose, a rose, ",
    "code": "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(1, 5)),
    "prose": "It was late in the autumn of that year when my uncle, who had never written to us before, sent word",
}


class OnHost:
    """The guesses of another draft, without its form for the device."""

    def __init__(self, draft: sc.NGramDraft):
        self.num_draft, self.worth, self.propose = draft.num_draft, draft.worth, draft.propose


def _models() -> dict[str, sc.Model]:
    return {"tiny-hybrid": tiny_model()} | ({"SmolLM2-135M": sc.load(str(_REAL))} if _REAL.exists() else {})


def _window_case(runtime: sc.Runtime, width: int) -> Case:
    tokens = np.full((1, width), 50)

    def call():
        logits = runtime.verify(tokens)
        runtime.commit(0)
        return logits

    return Case(what=f"verify of {width}, commit of 0", call=call)


def _step_case(runtime: sc.Runtime) -> Case:
    start = runtime.capture()

    def call():
        return runtime.step([50])

    def setup():
        runtime.exchange(runtime.copy(start))

    return Case(what="a step", call=lambda _: call(), setup=setup)


def _windows(sizes: Sizes, model: sc.Model, name: str) -> Iterator:
    runtime = sc.Runtime(model, capacity=_CAPACITY)
    runtime.extend(np.full((1, 128), 50))
    window, step = _window_case(runtime, _NUM_DRAFT + 1), _step_case(sc.Runtime(model, capacity=_CAPACITY))
    yield compare(f"{name}: verify of 8 / step", window, step, num_pairs=sizes.num_pairs, goal="<= 1.7 at 130M")


def speculate(sizes: Sizes) -> Iterator[Record]:
    """Text that repeats and prose: drafts against plain decoding, the loop on the device against the host's."""
    for name, model in _models().items():
        [cost] = _windows(sizes, model, name)
        yield cost
        # A window must emit as many tokens as it takes steps, or it does not pay.
        draft = sc.NGramDraft(num_draft=_NUM_DRAFT, min_ngram=3, worth=max(1.1, cost.median))
        runtime = sc.Runtime(model, capacity=_CAPACITY)
        for text, prompt in _TEXTS.items():
            goal = "<= 1.05" if text == "prose" else "<= 0.56"
            plain, wanted, _ = _run_case(runtime, prompt, sizes.num_tokens, None)
            looped, found, made = _run_case(runtime, prompt, sizes.num_tokens, draft)
            yield compare(f"{name}: drafts / plain, {text}", looped, plain, num_pairs=sizes.num_pairs, goal=goal)
            other = sum(a != b for a, b in zip(wanted, found, strict=True))
            yield Fact(
                name=f"{name}: other tokens, {text}", what=f"of {len(found)}, {made.mode}", value=other, goal="0"
            )
        always = sc.NGramDraft(num_draft=_NUM_DRAFT, min_ngram=3, worth=0.0)
        looped, _, _ = _run_case(runtime, _TEXTS["repeating"], sizes.num_tokens, always)
        hosted, _, _ = _run_case(runtime, _TEXTS["repeating"], sizes.num_tokens, OnHost(always))
        yield compare(f"{name}: device loop / host loop", looped, hosted, num_pairs=sizes.num_pairs, goal="<= 0.77")


def _run_case(runtime: sc.Runtime, prompt: str, num_tokens: int, draft) -> tuple:
    """Returns a run, what it emits, and what speculation did; starting it is not timed."""

    def start() -> sc.Generation:
        return sc.Generation(runtime, prompt, max_tokens=num_tokens)

    def run(generation: sc.Generation) -> list[int]:
        return generation.run(num_tokens, speculate=draft)

    tried = start()
    output, made = run(tried), tried.speculation
    told = "plain" if draft is None else f"{made.tokens_per_verify:.2f} tokens a verify, {made.num_verifies} of them"
    return Case(what=told, call=run, setup=start), output, made


def host_time(sizes: Sizes) -> Iterator[Record]:
    """Time a token of the loop on the device that is not the call of the loop itself."""
    runtime, draft = sc.Runtime(tiny_model(), capacity=_CAPACITY), sc.NGramDraft(num_draft=_NUM_DRAFT, worth=0.0)
    inside: list[float] = []
    call = runtime.speculate

    def watched(*args, **options):
        start = time.perf_counter()
        result = call(*args, **options)
        inside.append(time.perf_counter() - start)
        return result

    runtime.speculate = watched  # pyright: ignore[reportAttributeAccessIssue]
    excess = []
    for turn in range(sizes.num_pairs + 2):
        generation = sc.Generation(runtime, _TEXTS["repeating"], max_tokens=sizes.num_tokens)
        inside.clear()
        start = time.perf_counter()
        generation.run(sizes.num_tokens, speculate=draft)
        if turn >= 2:  # the first ones compile
            excess.append((time.perf_counter() - start - sum(inside)) / sizes.num_tokens)
    p10, median, p90 = np.percentile(excess, [10, 50, 90]).tolist()
    name, what = "device loop, host time a token", "run less the calls of the loop, tiny-hybrid"
    yield Timing(name=name, what=what, median=median, p10=p10, p90=p90, num_runs=len(excess), goal="< 30 us")


def parity(sizes: Sizes) -> Iterator[Record]:
    """Rows of a verify that differ from decoding, counted on this machine."""
    del sizes
    for name, model in _models().items():
        found = probe_parity(model, width=_NUM_DRAFT + 1, show=False)
        for one in found.modes:
            goal = "0" if one.mode == "exact" else ""
            what = f"rows of {one.num_rows} with other bits, at most {one.max_ulp} ulp"
            yield Fact(name=f"{name}: {one.mode}", what=what, value=one.num_bits, goal=goal)
            yield Fact(name=f"{name}: {one.mode}, greedy", what="rows with another token", value=one.num_greedy)
    jax.clear_caches()


BENCHES: dict[str, Callable[[Sizes], Iterator[Record]]] = {
    "speculate": speculate,
    "speculate_host_time": host_time,
    "speculate_parity": parity,
}

if __name__ == "__main__":
    from bench.__main__ import main

    main(tuple(BENCHES))

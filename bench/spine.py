"""What exists first: captures, exchange, estimates, commit and verify, donation, speculation.

Each function of `BENCHES` yields its records one by one. States are made of `np.array`
copies and never of `np.asarray` views where they are donated: a live view makes XLA copy
a donated buffer, and says nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import statecore as sc
from bench.harness import MIN_PAIRS, Case, Record, compare, measure
from statecore._typing import PyTree
from statecore.backend import launch

_MIB = 2**20
_WINDOW = 8
_CAPACITY = 512
_PROMPT = "to be, or not to be, that is the question: " * 4
_HOST_REPEAT = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    num_pairs: pairs, or runs, of each measurement.
    state_mib: size of the state that is captured.
    large_mib: size of the state that is exchanged, against one of 1 MiB.
    batch: sequences of the commit that is compared with a copy of its planes.
    num_tokens: tokens of one generation.
    shapes: names of the recurrent shapes in `bench/ssm.py`.
    """

    num_pairs: int
    state_mib: int
    large_mib: int
    batch: int
    num_tokens: int
    shapes: tuple[str, ...]


FULL = Sizes(num_pairs=31, state_mib=64, large_mib=256, batch=64, num_tokens=128, shapes=("130M", "2.7B/8"))
QUICK = Sizes(num_pairs=MIN_PAIRS, state_mib=16, large_mib=64, batch=32, num_tokens=64, shapes=("130M/6",))


# Synthetic states.


def synthetic_state(num_mib: int, num_leaves: int = 4) -> dict[str, jax.Array]:
    """Returns a state of `num_mib` MiB in a few float32 leaves of equal size."""
    shape = (num_mib * _MIB // (4 * num_leaves),)
    return {f"plane_{i}": jnp.full(shape, float(i)) for i in range(num_leaves)}


def memcpy_case(leaves: list[jax.Array], what: str) -> Case:
    """Returns `np.copyto` of all `leaves`, from and into memory that has been touched."""
    sources = [np.array(leaf) for leaf in leaves]
    targets = [source.copy() for source in sources]

    def call():
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    return Case(what=what, call=call)


def capture(sizes: Sizes) -> Iterator[Record]:
    """Captures against a copy of the same bytes by NumPy."""
    state = synthetic_state(sizes.state_mib)
    memcpy = memcpy_case(list(state.values()), f"np.copyto, {sizes.state_mib} MiB")
    pool = [sc.capture(state)]

    def pooled():
        pool[0] = sc.capture(state, into=pool[0])
        return pool[0]

    case = Case(what="sc.capture(state, into=slot)", call=pooled)
    yield compare("pooled capture / memcpy", case, memcpy, num_pairs=sizes.num_pairs, goal="<= 1.11")
    case = Case(what="sc.capture(state)", call=lambda: sc.capture(state))
    yield compare("fresh capture / memcpy", case, memcpy, num_pairs=sizes.num_pairs)


def _exchange_case(num_mib: int) -> Case:
    state = synthetic_state(num_mib)
    pair = [state, sc.capture(state)]

    def call():
        pair[:] = sc.exchange(*pair)

    return Case(what=f"sc.exchange, {num_mib} MiB", call=call)


def exchange(sizes: Sizes) -> Iterator[Record]:
    """Exchange of a large state against a small one, and of a runtime's state."""
    large, small = _exchange_case(sizes.large_mib), _exchange_case(1)
    yield compare(
        "exchange, large / small", large, small, num_pairs=sizes.num_pairs, repeat=_HOST_REPEAT, goal="<= 1.2"
    )

    runtime = sc.Runtime(tiny_model(), capacity=_CAPACITY)
    held = [runtime.capture()]

    def call():
        held[0] = runtime.exchange(held[0])

    case = Case(what="runtime.exchange, validated, 7 planes", call=call)
    yield measure("runtime exchange", case, num_runs=sizes.num_pairs, repeat=_HOST_REPEAT, goal="<= 50 us")


def estimate(sizes: Sizes) -> Iterator[Record]:
    """Estimates, which do no work on the device."""
    geometry = tiny_model().geometry(capacity=_CAPACITY)
    cases = {
        "estimate": Case(what="sc.estimate, 7 planes", call=lambda: sc.estimate(geometry)),
        "growth": Case(what="sc.estimate_growth, 7 planes", call=lambda: sc.estimate_growth(geometry, 100, 16)),
    }
    for name, case in cases.items():
        yield measure(name, case, num_runs=sizes.num_pairs, repeat=_HOST_REPEAT, goal="<= 50 us")


# The embedded model.


@functools.cache
def tiny_model() -> sc.Model:
    """Returns the embedded model, loaded once."""
    return sc.load("tiny-hybrid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bed:
    """The embedded model at some batch, with a prompt in its state.

    model: the loaded model.
    state: `batch` sequences after the prompt; kept usable, so each case donates a capture.
    batch: the sequences.
    """

    model: sc.Model
    state: PyTree
    batch: int

    def fresh(self):
        """Returns a state to donate."""
        return sc.capture(self.state)

    def tokens(self, num_rows: int) -> np.ndarray:
        """Returns a window of tokens, `[B, num_rows]`."""
        return np.full((self.batch, num_rows), 101, np.int32)

    def counts(self, num_rows: int) -> np.ndarray:
        """Returns `num_rows` for each sequence, `[B]`."""
        return np.full(self.batch, num_rows, np.int32)

    def step_case(self) -> Case:
        """One donated decode step, without checks."""
        backend, params, tokens = self.model.backend, self.model.params, self.tokens(1)[:, 0]
        return Case(
            what="step, unchecked",
            call=lambda state: launch.step(backend, params, state, tokens, donate=True),
            setup=self.fresh,
        )

    def verify_case(self, num_rows: int) -> Case:
        """One donated verify, without checks."""
        backend, params = self.model.backend, self.model.params
        tokens, counts = self.tokens(num_rows), self.counts(num_rows)
        return Case(
            what=f"verify of {num_rows}",
            call=lambda state: launch.verify(backend, params, state, tokens, counts, mode="fast", donate=True),
            setup=self.fresh,
        )

    def commit_case(self, num_accepted: int, num_rows: int) -> Case:
        """One donated commit of a fresh window, without checks."""
        backend, counts = self.model.backend, self.counts(num_accepted)
        return Case(
            what=f"commit of {num_accepted} of {num_rows}",
            call=lambda window: launch.commit(backend, window.state, window.trace, counts, mode="fast", donate=True),
            setup=lambda: sc.verify(backend, self.model.params, self.state, self.tokens(num_rows)),
        )

    def moving_planes(self) -> list[jax.Array]:
        """Returns the planes that a commit advances, less the position."""
        layout = self.model.backend.layout
        leaves = layout.leaves(self.state)
        return [leaves[i] for i in layout.indices("shift", "recurrent")]


@functools.cache
def make_bed(batch: int) -> Bed:
    """Returns the embedded model with the prompt read, at `batch` sequences."""
    model = tiny_model()
    tokens = np.tile(np.array([*_PROMPT.encode()], np.int32), (batch, 1))
    state = model.backend.init(model.params, batch=batch, capacity=_CAPACITY)
    state, _ = sc.extend(model.backend, model.params, state, tokens, logits="none")
    return Bed(model=model, state=state, batch=batch)


def commit(sizes: Sizes) -> Iterator[Record]:
    """Commits against a copy of the planes they advance, each other, and their verify."""
    run = functools.partial(compare, num_pairs=sizes.num_pairs)
    for batch in (sizes.batch, 1):
        bed = make_bed(batch)
        num_bytes = sum(leaf.nbytes for leaf in bed.moving_planes())
        memcpy = memcpy_case(bed.moving_planes(), f"np.copyto of {num_bytes / _MIB:.2f} MiB, its planes")
        # One sequence has so few bytes that the call itself is all one sees; no goal there.
        goal = "<= 1" if batch > 1 else ""
        for num_accepted in (0, _WINDOW // 2, _WINDOW):
            case = bed.commit_case(num_accepted, _WINDOW)
            yield run(f"commit {num_accepted} / memcpy, B={batch}", case, memcpy, goal=goal)
        every, none = bed.commit_case(_WINDOW, _WINDOW), bed.commit_case(0, _WINDOW)
        yield run(f"commit {_WINDOW} / commit 0, B={batch}", every, none, goal="1: any count alike")
        goal = "<= 0.06 at Mamba-2 20M"
        yield run(f"commit / its verify, B={batch}", every, bed.verify_case(_WINDOW), goal=goal)


def verify(sizes: Sizes) -> Iterator[Record]:
    """Verifies against one decode step, and both against their matrix products alone."""
    bed = make_bed(1)
    run = functools.partial(compare, num_pairs=sizes.num_pairs)
    for num_rows, goal in ((_WINDOW // 2, ""), (_WINDOW, "<= 1.7")):
        case = bed.verify_case(num_rows)
        yield run(f"verify {num_rows} / step", case, bed.step_case(), goal=goal)
        yield run(f"verify {num_rows} / products", case, products_case(bed.model.params, num_rows), goal="<= 1.15")
    yield run("step / products", bed.step_case(), products_case(bed.model.params, 1), goal="<= 1.2 at Mamba-2 130M")


def products_case(params: PyTree, num_rows: int) -> Case:
    """Returns the model's matrix products alone, one after another, at `num_rows` rows."""
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    not_products = ("embed", "conv_weight")
    matrices = [leaf for path, leaf in named if leaf.ndim == 2 and path[-1].key not in not_products]
    inputs = [jnp.ones((1, num_rows, matrix.shape[0])) for matrix in matrices]

    @jax.jit
    def chain(matrices, inputs):
        output = jnp.zeros((1, num_rows, 1))
        for matrix, given in zip(matrices, inputs, strict=True):
            # A trace of the last product, so that the next one waits for it, as in the model.
            output = (given + output[..., :1] * 1e-30) @ matrix
        return output

    return Case(what=f"its {len(matrices)} products, M = {num_rows}", call=lambda: chain(matrices, inputs))


def donation(sizes: Sizes) -> Iterator[Record]:
    """What a step pays to leave its argument usable, and for its checks."""
    for batch in (1, sizes.batch):
        bed = make_bed(batch)
        backend, params, tokens = bed.model.backend, bed.model.params, bed.tokens(1)[:, 0]

        def step(state, donate, backend=backend, params=params, tokens=tokens):
            return sc.step(backend, params, state, tokens, donate=donate)

        kept = Case(what="sc.step", call=functools.partial(step, donate=False), setup=bed.fresh)
        donated = Case(what="sc.step, donate=True", call=functools.partial(step, donate=True), setup=bed.fresh)
        yield compare(f"kept step / donated, B={batch}", kept, donated, num_pairs=sizes.num_pairs)
        yield compare(f"checked step / unchecked, B={batch}", donated, bed.step_case(), num_pairs=sizes.num_pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownDraft:
    """Guesses what it was told, so that no guess is wrong: what is left is the machinery.

    tokens: prompt and output.
    num_draft: the most tokens guessed at once.
    """

    tokens: list[int]
    num_draft: int

    def propose(self, history: Sequence[int], limit: int) -> list[int]:
        """Returns the next `limit` tokens."""
        return self.tokens[len(history) : len(history) + limit]


def speculation(sizes: Sizes) -> Iterator[Record]:
    """Speculative decoding of a text that repeats itself against plain decoding of it."""
    plain, output = _generation_case(sizes.num_tokens, None)
    known = [*_PROMPT.encode(), *output]
    goal = "< 1; tokens/s is its inverse"
    for name, draft in (
        ("n-gram drafts / plain", sc.NGramDraft(num_draft=4)),
        ("right drafts of 4 / plain", KnownDraft(tokens=known, num_draft=4)),
        ("right drafts of 8 / plain", KnownDraft(tokens=known, num_draft=8)),
    ):
        drafted, _ = _generation_case(sizes.num_tokens, draft)
        yield compare(name, drafted, plain, num_pairs=sizes.num_pairs, goal=goal)


def _generation_case(num_tokens: int, draft: sc.Draft | None) -> tuple[Case, list[int]]:
    """Returns a run and what it emits; starting it and reading its prompt are not timed."""
    runtime = sc.Runtime(tiny_model(), capacity=_CAPACITY)

    def start() -> sc.Generation:
        return sc.Generation(runtime, _PROMPT, max_tokens=num_tokens)

    def run(generation: sc.Generation) -> list[int]:
        return generation.run(num_tokens, speculate=draft)

    tried = start()
    output = run(tried)
    what = f"plain, {num_tokens} tokens"
    if draft is not None:
        what = f"drafts of {draft.num_draft}, {tried.speculation.tokens_per_verify:.2f} tokens a verify"
    return Case(what=what, call=run, setup=start), output


BENCHES: dict[str, Callable[[Sizes], Iterator[Record]]] = {
    "capture": capture,
    "exchange": exchange,
    "estimate": estimate,
    "commit": commit,
    "verify": verify,
    "donation": donation,
    "speculation": speculation,
}

"""`statecore demo`: every operation on the embedded model, each checked as it runs."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import statecore as sc
from statecore.cli._arguments import MODEL_HELP
from statecore.cli._emissions import RecordedDraft, emissions_of
from statecore.cli._file import check_writable, write_page
from statecore.cli._numbers import NumberTokenizer, with_text
from statecore.cli._page import page
from statecore.cli._report import print_report
from statecore.cli._timing import paired
from statecore.display import TreeNode, geometry_rows, run_nodes, show
from statecore.testing import AliasingRuntime, LawViolation, check_commit, forgets_conv, off_by_one

_FAULTS = ("forget-conv", "off-by-one", "alias")
_NUM_DRAFT = 7
# Greedy text repeats itself only after a while, and repetition is what a draft finds.
_SPECULATED = 160


@dataclasses.dataclass(kw_only=True)
class Report:
    """What the demo found.

    tree: the branches of the futures.
    checks: by name, whether each claim held.
    details: by name of a failed check, what was seen.
    anatomy: the state at the end of the first future as HTML; for the page only.
    """

    geometry: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    text: str = ""
    futures: list[str] = dataclasses.field(default_factory=list)
    tree: TreeNode | None = None
    speculation: dict[str, Any] = dataclasses.field(default_factory=dict)
    costs: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: dict[str, bool] = dataclasses.field(default_factory=dict)
    details: dict[str, str] = dataclasses.field(default_factory=dict)
    injected: str | None = None
    anatomy: str | None = None

    def to_json(self) -> str:
        """Returns the report as one JSON object, without what is empty."""
        shown = dataclasses.asdict(dataclasses.replace(self, anatomy=None))
        return json.dumps({key: value for key, value in shown.items() if value not in (None, {})}, indent=2)

    def check(self, name: str, holds: bool, detail: str = "") -> None:
        """Records a check."""
        self.checks[name] = bool(holds)
        if not holds:
            self.details[name] = detail or "the two differ"

    @contextmanager
    def guarded(self, *names: str) -> Iterator[None]:
        """Records the checks `names` as failed if what is inside raises an error of ours."""
        try:
            yield
        except (sc.StateError, LawViolation) as error:
            for name in names:
                if self.checks.get(name, True):
                    self.check(name, False, str(error))


def add_parser(commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="show and check everything on a model",
        description="Generates, captures, branches, exchanges and speculates on a model, and checks that "
        "each is exact. Exit status 1 if a check fails.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--html",
        metavar="PATH",
        type=Path,
        help="write the report as a page there; without it, into a file for temporary files, named at the end "
        "(with --json, none)",
    )
    parser.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument("--model", default="tiny-hybrid", help=MODEL_HELP)
    parser.add_argument("--prompt", help="the text to continue, or token ids if the model has no tokenizer")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--inject", choices=_FAULTS, help="plant this fault; the demo must find it and exit with 1")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    if args.html is not None:
        check_writable(args.html)
    report = make_report(args.model, args.prompt, args.tokens, args.seed, args.inject, quiet=args.json)
    if args.json:
        print(report.to_json())
    else:
        print_report(report)
    if args.html is not None or not (args.json or args.no_html):
        path = write_page(page(report), args.html)
        # One JSON object is all that --json prints.
        print(f"The report as a page: {path}", file=sys.stderr if args.json else sys.stdout)
    return 0 if all(report.checks.values()) else 1


def make_report(
    target: str, prompt: str | None, num_tokens: int, seed: int, fault: str | None, *, quiet: bool
) -> Report:
    """Runs every section, with a progress bar unless `quiet`."""
    from rich.console import Console
    from rich.progress import Progress

    report = Report(injected=fault)
    model, runtime_class = _planted(with_text(sc.load(target, progress=False if quiet else None)), fault)
    assert model.tokenizer is not None
    prompt = _prompt(model) if prompt is None else prompt
    needed = len(model.tokenizer.encode(prompt)) + max(num_tokens, _SPECULATED)
    capacity = -(-needed // 128) * 128  # rounded up, so that other prompts compile nothing new
    runtime = runtime_class(model, capacity=capacity)
    sections: list[tuple[str, Callable[[], None]]] = [
        ("geometry", lambda: _geometry(report, runtime)),
        ("text and futures", lambda: _futures(report, runtime, prompt, num_tokens, seed)),
        ("speculation", lambda: _speculation(report, runtime, prompt, max(num_tokens, _SPECULATED))),
        ("commits", lambda: _commits(report, runtime, prompt)),
        ("identity", lambda: _identity(report, runtime, target)),
        ("costs", lambda: _costs(report, model, capacity)),
    ]
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        bar = progress.add_task("demo", total=len(sections))
        for name, section in sections:
            progress.update(bar, description=name)
            section()
            progress.advance(bar)
    return report


def _prompt(model: sc.Model) -> str:
    """Returns a prompt of at least 8 tokens that means something to the model, or at least repeats itself."""
    return "1 2 3 4 5 6 7 8" if isinstance(model.tokenizer, NumberTokenizer) else "HAMLET.\nTo be, or not to be"


def _planted(model: sc.Model, fault: str | None) -> tuple[sc.Model, type[sc.Runtime]]:
    """Returns the model and the kind of runtime, with the fault in one of them."""
    if fault == "forget-conv":
        return dataclasses.replace(model, backend=forgets_conv(model.backend)), sc.Runtime
    if fault == "off-by-one":
        return dataclasses.replace(model, backend=off_by_one(model.backend)), sc.Runtime
    return model, AliasingRuntime if fault == "alias" else sc.Runtime


def _geometry(report: Report, runtime: sc.Runtime) -> None:
    report.geometry = geometry_rows(runtime.geometry)
    report.check("at most 12 leaves", len(report.geometry) <= 12, f"{len(report.geometry)} leaves")


def _futures(report: Report, runtime: sc.Runtime, prompt: str, num_tokens: int, seed: int) -> None:
    """Branches two futures from one snapshot, goes back and forth, and looks at the snapshot again."""
    repeats, unchanged, back = (
        "a restored run repeats itself",
        "a capture is unchanged by what followed",
        "exchanging back gives the first future back",
    )
    sampler = sc.Sampler(temperature=0.7)
    gen = sc.Generation(runtime, prompt, sampler=sampler, seed=seed, max_tokens=num_tokens)
    half = max(1, num_tokens // 2)
    with report.guarded(repeats, unchanged, back):
        snapshot = gen.snapshot()
        before = jax.tree.map(np.array, snapshot.slot.state)
        first = gen.run(half)
        report.text = str(gen.text)
        gen.restore(snapshot)
        report.check(repeats, gen.run(half) == first)
        other = gen.fork(snapshot, seed=seed + 1)
        gen.exchange(other)
        gen.run(half)
        report.futures = [prompt + report.text, prompt + str(gen.text)]
        gen.exchange(other)
        rest = gen.run(num_tokens - half) if num_tokens > half else []
        report.text = str(gen.text)
        gen.restore(snapshot)
        report.check(back, gen.run(num_tokens) == first + rest)
        report.tree = run_nodes(gen.tree())
        report.anatomy = show(runtime.state, runtime.model.backend).html
        report.check(unchanged, _same_bits(before, snapshot.slot.state))


def _speculation(report: Report, runtime: sc.Runtime, prompt: str, num_tokens: int) -> None:
    """Runs the same greedy text plainly and with drafts, each twice: the first run compiles."""
    # Of another model's text nothing is known: it may repeat nothing, and rounding may choose between equal tokens.
    is_embedded = runtime.model.name == "tiny-hybrid"
    name = "speculative text is plain text" + (", with more than one token a verify" if is_embedded else "")
    draft = RecordedDraft(sc.NGramDraft(num_draft=_NUM_DRAFT))

    def timed(speculate: sc.Draft | None) -> tuple[sc.Generation, float]:
        gen = sc.Generation(runtime, prompt, max_tokens=num_tokens, lossless=not is_embedded)
        start = time.perf_counter()
        gen.run(num_tokens, speculate=speculate)
        return gen, num_tokens / (time.perf_counter() - start)

    with report.guarded(name):
        for speculate in (None, draft):
            timed(speculate)
        plain, plain_rate = timed(None)
        draft.proposals.clear()
        fast, fast_rate = timed(draft)
        same = plain.tokens == fast.tokens
        per_verify = fast.speculation.tokens_per_verify
        report.speculation = {
            "same_text": same,
            "tokens_per_verify": round(per_verify, 3),
            "tokens_per_second": round(fast_rate, 1),
            "plain_tokens_per_second": round(plain_rate, 1),
            "text_tokens": num_tokens,
            **dataclasses.asdict(fast.speculation),
            "emissions": emissions_of(draft.proposals, _num_prompt(runtime, prompt), fast.tokens, runtime.model),
        }
        report.check(
            name, same and (per_verify > 1 or not is_embedded), f"same text: {same}, {per_verify:.2f} tokens a verify"
        )


def _num_prompt(runtime: sc.Runtime, prompt: str) -> int:
    assert runtime.model.tokenizer is not None
    return len(runtime.model.tokenizer.encode(prompt))


def _commits(report: Report, runtime: sc.Runtime, prompt: str) -> None:
    """Holds every commit of a window against single steps: by bits, and up to rounding."""
    model = runtime.model
    assert model.tokenizer is not None
    tokens = np.array([model.tokenizer.encode(prompt * 4)])
    state = model.backend.init(model.params, capacity=runtime.geometry.capacity)
    state, _ = sc.extend(model.backend, model.params, state, tokens[:, :16])
    window = tokens[:, 1:6]
    for mode, tolerance in (("exact", None), ("fast", 1e-5)):
        name = f"rows kept are steps taken ({mode})"
        with report.guarded(name):
            for num_rows in range(window.shape[1] + 1):
                check_commit(model.backend, model.params, state, window, [num_rows], mode=mode, tolerance=tolerance)
            report.check(name, True)


def _identity(report: Report, runtime: sc.Runtime, target: str) -> None:
    """Offers the slot of a second load of the same model, which must be refused."""
    name = "a look-alike model's slot is refused"
    twin = sc.Runtime(sc.load(target, progress=False), capacity=runtime.geometry.capacity)
    try:
        runtime.exchange(twin.capture())
    except sc.IdentityError:
        report.check(name, True)
    else:
        report.check(name, False, "the slot was installed")


def _costs(report: Report, model: sc.Model, capacity: int) -> None:
    """Measures capture against `np.copyto`, exchange, and commit against its verify."""
    runtime = sc.Runtime(model, capacity=capacity)
    runtime.extend([[10] * 16])
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(runtime.state)]
    targets = [np.empty_like(leaf) for leaf in leaves]
    held = [runtime.capture(), runtime.capture()]

    def capture() -> None:
        held[0] = runtime.capture(into=held[0])

    def copy_plainly() -> None:
        for target, leaf in zip(targets, leaves, strict=True):
            np.copyto(target, leaf)

    def exchange() -> None:
        held[1] = runtime.exchange(held[1])

    window = [[10] * (_NUM_DRAFT + 1)]
    report.costs = {
        "state_bytes": sum(leaf.nbytes for leaf in leaves),
        "capture_into_slot": paired(capture, copy_plainly) | {"against": "np.copyto of the same bytes"},
        "exchange": paired(exchange, capture) | {"against": "capture"},
        "commit": _commit_cost(runtime, window) | {"against": "its verify"},
    }


def _commit_cost(runtime: sc.Runtime, window: list[list[int]]) -> dict[str, float]:
    def verify() -> None:
        jax.block_until_ready(runtime.verify(window))

    def commit() -> None:
        # Nothing is kept, so that every round starts from the same state; the cost does not depend on it.
        runtime.commit(0)
        jax.block_until_ready(runtime.state)

    measured = paired(verify, commit)
    return {
        "microseconds": measured["against_microseconds"],
        "against_microseconds": measured["microseconds"],
        "ratio": round(1 / measured["ratio"], 3),
    }


def _same_bits(before: Any, state: Any) -> bool:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True)
    return all(not leaf.is_deleted() and np.array(leaf).tobytes() == old.tobytes() for old, leaf in pairs)

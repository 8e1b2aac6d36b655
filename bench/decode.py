"""Real model shapes: against Hugging Face on torch, against their own matrix products, and what loading takes.

`python bench/decode.py --quick` runs it alone. The reference runs in another process, with
the Python of `--peer` or that of `make bench-peers`; without one, only our own rows are
measured. Both run the same random weights, and nothing is timed before their logits agree.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, `bench` is not found otherwise

import jax
import numpy as np
from rich.console import Console

from bench.decode_folder import write_folder
from bench.decode_link import PEER, Peer, PeerCase, compare_across
from bench.decode_memory import is_known, measure_load_apart
from bench.decode_own import NUM_PREFIX, NUM_PROMPT, NUM_WINDOW, Bed, leaves, load_bed, make_texts
from bench.decode_shapes import SHAPES, Shape
from bench.harness import MIN_PAIRS, Fact, Record, compare, print_records, write_json
from statecore.models.families import FAMILIES

_ROOT = Path(__file__).parents[1]
_PEER_PYTHON = _ROOT / ".cache" / "peers" / "bin" / "python"
_NUM_PAIRS = 31
_PIPE_WIDTH = 170
# Of logits whose standard deviation is 1; above it the two run different models.
_MOST_DIFFERENCE = 1e-3
_FASTER = "< 1: faster"


def measure_shape(shape: Shape, python: Path | None, num_pairs: int) -> Iterator[Record]:
    """Yields the rows of one shape: against the reference if there is a Python for it, then our own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        texts = make_texts(shape.config["vocab_size"])
        if python is None:
            write_folder(shape.full_config(), folder)
            bed = load_bed(folder, texts)
        else:
            with Peer([str(python), str(PEER)]) as peer:
                peer.ask("build", config=shape.full_config(), folder=str(folder), seed=0)
                peer.ask("warm", ids=texts.prefix)
                bed = load_bed(folder, texts)
                yield check_logits(shape, bed, peer, Path(scratch) / "logits.npy")
                yield from against_peer(shape, bed, peer, num_pairs)
        yield from against_products(shape, bed, num_pairs)
        del bed
        if is_known():
            yield measure_memory(shape, folder)


def check_logits(shape: Shape, bed: Bed, peer: Peer, file: Path) -> Fact:
    """Returns how far the logits of both are apart, of each pass that is timed after it.

    Raises:
      SystemExit: they are of different models.
    """
    texts = bed.texts
    passes = {
        "step": (bed.step(), texts.window[:1], True),
        "extend": (bed.extend(), texts.window, True),
        "verify": (bed.verify(), texts.window, True),
        "prefill": (bed.prefill(), texts.prompt, False),
    }
    worst = 0.0
    for name, (case, ids, is_warm) in passes.items():
        assert case.setup is not None
        logits = np.array(jax.tree.leaves(leaves(case.call(case.setup()))[1])[0])
        peer.ask("run", ids=ids, is_warm=is_warm, keep=0 if is_warm else 1, file=str(file))
        theirs = np.load(file)
        difference = float(np.abs(logits.reshape(theirs.shape) - theirs).max())
        if not difference <= _MOST_DIFFERENCE:
            raise SystemExit(
                f"{shape.name}: the logits of {name} differ from the reference's by {difference:.2g}, of a standard "
                f"deviation of {theirs.std():.2g}. These are two models, and nothing of them was timed."
            )
        worst = max(worst, difference)
    what = f"greatest, of {', '.join(passes)}; standard deviation 1"
    return Fact(name=f"{shape.name}: logits, ours - theirs", what=what, value=worst, goal=f"<= {_MOST_DIFFERENCE}")


def against_peer(shape: Shape, bed: Bed, peer: Peer, num_pairs: int) -> Iterator[Record]:
    """Yields ratios to the reference, which copies its cache before the clock starts, as we do."""
    texts = bed.texts

    def theirs(what: str, ids: list[int], *, is_warm: bool = True) -> PeerCase:
        options = {"ids": ids, "is_warm": is_warm, "keep": 0 if is_warm else 1}
        return PeerCase(what=what, call=lambda: peer.ask("run", **options)["seconds"])

    step = theirs(f"forward of 1, cache of {NUM_PREFIX}", texts.window[:1])
    window = theirs(f"forward of {NUM_WINDOW}, cache of {NUM_PREFIX}", texts.window)
    prefill = theirs(f"forward of {NUM_PROMPT}, last logits", texts.prompt, is_warm=False)
    rows = (
        ("one token", bed.step(), step, shape.decode_goal, num_pairs),
        ("verify 8", bed.verify(), window, "<= 0.25: 4 times faster", MIN_PAIRS),
        ("extend 8", bed.extend(), window, "<= 0.25: 4 times faster", MIN_PAIRS),
        ("prefill", bed.prefill(), prefill, "<= 1: not slower", MIN_PAIRS),
    )
    for name, own, other, goal, pairs in rows:
        yield compare_across(f"{shape.name}: {name} / reference", own, other, num_pairs=pairs, goal=goal)


def against_products(shape: Shape, bed: Bed, num_pairs: int) -> Iterator[Record]:
    """Yields ratios to nothing but the model's matrix products, and of a verify to a step."""
    step, verify = bed.step(), bed.verify()
    rows = (
        (f"one token / {bed.products(1).what}", step, bed.products(1), "<= 1.2"),
        (f"verify {NUM_WINDOW} / products", verify, bed.products(NUM_WINDOW), "<= 1.15"),
        (f"verify {NUM_WINDOW} / one token", verify, step, "<= 1.7"),
    )
    for name, a, b, goal in rows:
        yield compare(f"{shape.name}: {name}", a, b, num_pairs=num_pairs, goal=goal)


def measure_memory(shape: Shape, folder: Path) -> Fact:
    """Returns what a process that loads the folder takes at most, over the weights."""
    taken = measure_load_apart(folder)
    return Fact(
        name=f"{shape.name}: peak memory of sc.load / weights",
        what=f"growth of the resident peak, of {taken['weights'] / 2**20:.0f} MiB of weights",
        value=taken["growth"] / taken["weights"],
        goal="<= 1.15",
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python bench/decode.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{MIN_PAIRS} pairs, and models of a few layers")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="a Python that has torch and transformers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records and the environment to FILE")
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(SHAPES),
        metavar="NAME",
        help=f"measure this one, may be given again; NAME is one of {', '.join(SHAPES)}",
    )
    return parser


def find_peer(given: Path | None, say: Callable[[str], None]) -> Path | None:
    """Returns the Python of the reference, or None after saying so."""
    if given is not None:
        return given
    if _PEER_PYTHON.is_file():
        return _PEER_PYTHON
    say("No --peer, and no environment of `make bench-peers`: only our own rows are measured.")
    return None


def main() -> None:
    """Reads the command line, measures the shapes, and prints."""
    arguments = make_parser().parse_args()
    notes = Console(stderr=True, highlight=False)
    python = find_peer(arguments.peer, notes.print)
    # Two dozen layers, unrolled, compile for tens of seconds.
    jax.config.update("jax_compilation_cache_dir", str(_ROOT / ".cache" / "jax"))
    records: list[Record] = []
    for name in arguments.only or SHAPES:
        shape = SHAPES[name].quick() if arguments.quick else SHAPES[name]
        if shape.family not in FAMILIES:
            notes.print(f"{name} is skipped: no family {shape.family}; known are {', '.join(FAMILIES)}.")
            continue
        for record in measure_shape(shape, python, MIN_PAIRS if arguments.quick else _NUM_PAIRS):
            records.append(record)
            # Other work on the machine shows in the ratios: torch's threads wait for each other at each product.
            notes.print(f"{record.name}: done, load average {os.getloadavg()[0]:.1f}")
    print_records(Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH), records)
    if arguments.json is not None:
        write_json(arguments.json, records)


if __name__ == "__main__":
    main()

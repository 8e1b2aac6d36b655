"""`python -m bench`: runs the measurements and prints them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import native, speculate, spine, ssm
from bench.harness import Record, print_records, write_json
from bench.spine import FULL, QUICK, Sizes

BENCHES = spine.BENCHES | ssm.BENCHES | native.BENCHES | speculate.BENCHES
_EPILOG = (
    "Each ratio is the time of A over the time of B, taken in turn in one process; the table gives its median, p10 "
    "and p90 over the pairs. A wide p10 to p90 means that something else used the machine: run it again."
)
# A table has ten columns; a pipe has no width of its own.
_PIPE_WIDTH = 170


def make_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of the command line for the named benches."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure statecore by paired ratios.", epilog=_EPILOG
    )
    parser.add_argument("--quick", action="store_true", help="15 pairs and small sizes: a few minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records and the environment to FILE")
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"run this one, may be given again; NAME is one of {', '.join(names)}",
    )
    return parser


def run(names: Sequence[str], sizes: Sizes) -> list[Record]:
    """Returns the records of the named benches; the progress goes to standard error."""
    records: list[Record] = []
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            for record in BENCHES[name](sizes):
                records.append(record)
                progress.update(task, description=f"{name}: {record.name} done")
            progress.advance(task)
    return records


def main(names: Sequence[str] = tuple(BENCHES)) -> None:
    """Reads the command line, measures the named benches, or those of them asked for, and prints."""
    arguments = make_parser(names).parse_args()
    records = run(arguments.only or names, QUICK if arguments.quick else FULL)
    print_records(Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH), records)
    if arguments.json is not None:
        write_json(arguments.json, records)


if __name__ == "__main__":
    main()

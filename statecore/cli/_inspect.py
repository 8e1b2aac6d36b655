"""`statecore inspect`: what a model keeps, from its configuration alone."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

import statecore as sc
from statecore.backend import find_model
from statecore.cli._arguments import whole
from statecore.display import geometry_rows, geometry_table
from statecore.state import Geometry


def add_parser(commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "inspect",
        help="show what a model's state is and costs, without loading weights",
        description="Shows the planes of a model's state, what undoes each, and what states cost; reads its "
        "configuration only.",
    )
    parser.add_argument("path", help="a Hugging Face folder, a .gguf file, a config.json or a model the registry knows")
    parser.add_argument("--batch", type=whole, default=1, help="sequences (default: %(default)s)")
    parser.add_argument("--capacity", type=whole, default=2048, help="tokens of each (default: %(default)s)")
    parser.add_argument("--dtype", default=None, help="of the parameters (default: what the configuration says)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the geometry and its costs; returns the exit status."""
    path = Path(args.path)
    target = path.parent if path.name == "config.json" else args.path
    entry, _ = find_model(target, sc.default_registry())
    geometry = entry.geometry(batch=args.batch, capacity=args.capacity, dtype=args.dtype)
    found = describe(entry.name, geometry)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    console = Console()
    title = f"{entry.name}: the state of {args.batch} x {args.capacity:,} tokens"
    console.print(geometry_table(found["planes"], title))
    for name in ("bytes_per_token", "bytes_of_state"):
        console.print(f"{name.replace('_', ' '):16} {_bytes(found[name])}")
    window = found["max_window"]
    console.print(f"{'undo':16} {'windows of any width' if window is None else f'windows of up to {window} tokens'}")
    return 0


def describe(name: str, geometry: Geometry) -> dict[str, Any]:
    """Returns what `inspect --json` prints.

    `bytes_per_token` is what one more token of one sequence adds where nothing has wrapped
    or run full; `max_window` the widest window that rings can undo, None without rings.
    """
    growth = sc.estimate_growth(geometry, [0] * geometry.batch, 1)
    estimate = sc.estimate(geometry)
    windows = [
        plane.shape[plane.plane.axis] - plane.plane.size + 1
        for plane in geometry.planes
        if plane.plane.kind == "sliding" and plane.plane.axis is not None and plane.plane.size is not None
    ]
    return {
        "architecture": name,
        "batch": geometry.batch,
        "capacity": geometry.capacity,
        "bytes_per_token": None if growth is None else growth // geometry.batch,
        "bytes_of_state": None if estimate is None else estimate.retained_bytes,
        "max_window": min(windows, default=None),
        "planes": geometry_rows(geometry),
    }


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size:,}"

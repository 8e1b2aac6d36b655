"""The command line: `statecore demo`, `statecore generate` and `statecore inspect`."""

import argparse
import sys

import jax

from statecore import StateError, __version__
from statecore.cli import _demo, _generate, _inspect


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 if a check fails, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="statecore", description="The state of a language model, as a value.")
    parser.add_argument("--version", action="version", version=f"statecore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _demo.add_parser(commands)
    _generate.add_parser(commands)
    _inspect.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (StateError, UnicodeEncodeError, jax.errors.JaxRuntimeError) as error:
        print(f"statecore: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2

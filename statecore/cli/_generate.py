"""`statecore generate`: text from a prompt, as it is made."""

import argparse
import itertools
import sys
from typing import Any, cast

import statecore as sc
from statecore.cli._arguments import MODEL_HELP
from statecore.cli._numbers import with_text


def add_parser(commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("generate", help="continue a text", description="Continues a text and streams it.")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--model", default="tiny-hybrid", help=MODEL_HELP)
    parser.add_argument("--dtype", default=None, help="of the parameters (default: what the model's files say)")
    parser.add_argument("--chat", action="store_true", help="put the prompt as a message, by the model's template")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to emit (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=None, help="draw from the k most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that reach p")
    parser.add_argument("--min-p", type=float, default=0.0, help="drop tokens less likely than this share of the best")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 makes repetitions less likely")
    parser.add_argument(
        "--presence-penalty", type=float, default=0.0, help="taken from tokens that stand in the output"
    )
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="taken for each time they stand there")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--speculate", type=_count, default=0, metavar="N", help="guess N tokens ahead from repetitions"
    )
    parser.set_defaults(run=run)


def _asked(model: sc.Model, message: str) -> list[int]:
    """Returns the tokens of a message as the model's chat template puts it."""
    if not getattr(model.tokenizer, "has_chat", False):
        raise sc.UnsupportedError(f"{model.name} has no chat template, so a prompt is plain text: leave out --chat.")
    return cast(Any, model.tokenizer).encode_chat([{"role": "user", "content": message}])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 0 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Streams the text; returns the exit status."""
    sampler = sc.Sampler(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )
    model = with_text(sc.load(args.model, dtype=args.dtype))
    assert model.tokenizer is not None
    prompt = _asked(model, args.prompt) if args.chat else args.prompt
    tokens = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    runtime = sc.Runtime(model, capacity=max(1, len(tokens) + args.tokens))
    gen = sc.Generation(
        runtime,
        prompt,
        sampler=sampler,
        seed=args.seed,
        max_tokens=args.tokens,
        stop_strings=args.stop,
        stop_tokens=model.stop_tokens,
    )
    pieces = gen.stream(speculate=sc.NGramDraft(num_draft=args.speculate) if args.speculate else None)
    first = next(pieces)  # a draft that cannot be followed is refused before anything is written
    sys.stdout.write("" if args.chat else model.tokenizer.decode(tokens))
    for piece in itertools.chain([first], pieces):
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0

"""`statecore generate`: text from a prompt, as it is made."""

import argparse
import sys

import statecore as sc


def add_parser(commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("generate", help="continue a text", description="Continues a text and streams it.")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--model", default="tiny-hybrid", help="a model the registry knows (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to emit (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=None, help="draw from the k most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that reach p")
    parser.add_argument("--min-p", type=float, default=0.0, help="drop tokens less likely than this share of the best")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="guess N tokens ahead from repetitions")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Streams the text; returns the exit status."""
    sampler = sc.Sampler(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    model = sc.load(args.model)
    if model.tokenizer is None:
        raise sc.UnsupportedError(f"{model.name} has no tokenizer, so it cannot continue a text.")
    num_prompt = len(model.tokenizer.encode(args.prompt))
    runtime = sc.Runtime(model, capacity=max(1, num_prompt + args.tokens))
    generation = sc.Generation(runtime, args.prompt, sampler=sampler, seed=args.seed, max_tokens=args.tokens)
    draft = sc.NGramDraft(num_draft=args.speculate) if args.speculate else None
    shown = ""
    while generation.num_left:
        generation.run(min(8, generation.num_left), speculate=draft)
        if not shown:
            sys.stdout.write(model.tokenizer.decode(model.tokenizer.encode(args.prompt)))
        shown += _write(generation.text, shown, is_last=not generation.num_left)
    sys.stdout.write("\n")
    return 0


def _write(text: str | list[str], shown: str, *, is_last: bool) -> str:
    """Writes what is new in `text`; a character whose bytes are not all there is held back."""
    assert isinstance(text, str)  # one sequence
    new = text[len(shown) :]
    if not is_last:
        new = new.rstrip("\N{REPLACEMENT CHARACTER}")
    sys.stdout.write(new)
    sys.stdout.flush()
    return new

"""Branches one text into several futures and keeps the likeliest: best of `n`.

python examples/branch.py "ROMEO."
"""

import argparse

import statecore as sc


def main(argv: list[str] | None = None) -> None:
    """Samples `n` futures of one point and prints them, the likeliest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="ROMEO.")
    parser.add_argument("-n", type=int, default=4, help="futures (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=60, help="of each future (default: %(default)s)")
    args = parser.parse_args(argv)

    model = sc.load("tiny-hybrid")
    runtime = sc.Runtime(model, capacity=len(args.prompt.encode()) + args.tokens)
    sampler = sc.Sampler(temperature=0.8)
    gen = sc.Generation(runtime, args.prompt, sampler=sampler, num_logprobs=0, max_tokens=args.tokens)
    for future in sc.best_of_n(gen, args.n, args.tokens):  # the prompt is read once, whatever n is
        print(f"--- {future.score:.2f} nats a token\n{args.prompt}{future.text}")
    print(f"--- kept\n{args.prompt}{gen.text}\n\n{gen.tree()}")


if __name__ == "__main__":
    main()

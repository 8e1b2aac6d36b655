"""The likeliest continuations of a text by beam search, in which every beam is a row of one state.

python examples/beam.py "ROMEO." --stop "."
"""

import argparse

import statecore as sc


def main(argv: list[str] | None = None) -> None:
    """Prints the beams, the best first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="ROMEO.")
    parser.add_argument("--beams", type=int, default=6, help="beams kept (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="the most tokens (default: %(default)s)")
    parser.add_argument("--stop", default="\n", help="characters that end a beam (default: a newline)")
    args = parser.parse_args(argv)

    model = sc.load("tiny-hybrid")
    assert model.tokenizer is not None
    stops = model.tokenizer.encode(args.stop)
    beams = sc.beam_search(
        model, args.prompt, num_beams=args.beams, num_tokens=args.tokens, stop_tokens=stops, length_penalty=1.0
    )
    for beam in beams:
        end = "ended" if beam.is_finished else "cut"
        print(f"--- {beam.score:.3f} nats a token, {end}\n{args.prompt}{model.tokenizer.decode(list(beam.tokens))}")


if __name__ == "__main__":
    main()

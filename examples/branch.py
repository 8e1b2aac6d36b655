"""Branches one text into several futures and keeps the likeliest: best of `n`.

python examples/branch.py "ROMEO."
"""

import argparse

import jax
import jax.numpy as jnp

import statecore as sc


def log_probability(model: sc.Model, prompt: list[int], text: list[int]) -> float:
    """Returns the log-probability in nats of `text` after `prompt`, from one parallel pass."""
    tokens = jnp.array([prompt + text])
    state = model.backend.init(model.params, capacity=tokens.shape[1])
    _, logits = sc.extend(model.backend, model.params, state, tokens)
    assert logits is not None
    predicted = jax.nn.log_softmax(logits[0, len(prompt) - 1 : -1])
    return float(jnp.take_along_axis(predicted, tokens[0, len(prompt) :, None], axis=1).sum())


def main(argv: list[str] | None = None) -> None:
    """Samples `n` futures of one snapshot and prints them, the likeliest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="ROMEO.")
    parser.add_argument("-n", type=int, default=4, help="futures")
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args(argv)

    model = sc.load("tiny-hybrid")
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode(args.prompt)
    runtime = sc.Runtime(model, capacity=len(prompt) + args.tokens)
    gen = sc.Generation(runtime, prompt, sampler=sc.Sampler(temperature=0.8), max_tokens=args.tokens)
    start = gen.snapshot()  # the prompt is read once, whatever n is
    futures = []
    for seed in range(args.n):
        branch = gen.fork(start, seed=seed)
        gen.exchange(branch)
        text = gen.run(args.tokens)
        gen.exchange(branch)
        futures.append((log_probability(model, prompt, text), model.tokenizer.decode(text)))
    for score, text in sorted(futures, reverse=True):
        print(f"--- {score:.1f} nats\n{args.prompt}{text}")


if __name__ == "__main__":
    main()

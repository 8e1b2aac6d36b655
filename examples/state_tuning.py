"""Trains the state that the embedded model begins with, and nothing else: state tuning.

    python examples/state_tuning.py --prompt "ROMEO." --target " I do not love the moon."

The parameters stay as they are. What is learned is the recurrent plane of the empty
state, so that after the prompt the model goes on with the target.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import Progress, TextColumn

import statecore as sc
from statecore.state import patch


def tuned(model: sc.Model, state: object, hidden: jax.Array) -> object:
    """Returns `state` with the recurrent plane `hidden`; differentiable in it."""
    return patch(state, "hidden", lambda _: hidden, planes=model.backend)


def target_loss(model: sc.Model, state: object, prompt: list[int], target: list[int]) -> jax.Array:
    """Returns the mean cross-entropy in nats per token of `target` after `prompt`."""
    tokens = np.array([prompt + target])
    _, logits = sc.extend(model.backend, model.params, state, tokens)
    assert logits is not None
    predicted = logits[0, len(prompt) - 1 : -1]
    return optax.softmax_cross_entropy_with_integer_labels(predicted, jnp.array(target)).mean()


def greedy(model: sc.Model, state: object, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the likeliest tokens, one by one."""
    state, logits = sc.extend(model.backend, model.params, state, [prompt], logits="last")
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        assert logits is not None
        tokens.append(int(logits[0].argmax()))
        state, logits = sc.step(model.backend, model.params, state, [tokens[-1]], donate=True)
    return tokens


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Trains, prints the loss and the text before and after; returns the two losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="ROMEO.")
    parser.add_argument("--target", default="\nI am a state, and I was trained.")
    parser.add_argument("--steps", type=int, default=60, help="of Adam (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="of learning (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="to show of each text (default: %(default)s)")
    args = parser.parse_args(argv)

    model = sc.load("tiny-hybrid")
    assert model.tokenizer is not None
    prompt, target = model.tokenizer.encode(args.prompt), model.tokenizer.encode(args.target)
    empty = model.backend.init(model.params, capacity=len(prompt) + max(len(target), args.tokens))
    hidden = jnp.copy(empty["hidden"])
    optimizer = optax.adam(args.rate)
    optimizer_state = optimizer.init(hidden)

    def loss_of(hidden: jax.Array) -> jax.Array:
        return target_loss(model, tuned(model, empty, hidden), prompt, target)

    @jax.jit
    def train_step(hidden, optimizer_state):
        loss, gradient = jax.value_and_grad(loss_of)(hidden)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        return optax.apply_updates(hidden, updates), optimizer_state, loss

    losses: list[float] = []
    tuned_hidden = hidden
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[loss]} nats per token"))
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("tuning", total=args.steps + 1, loss="?")
        for _ in range(args.steps + 1):  # the last one is only for the loss after
            tuned_hidden = hidden
            hidden, optimizer_state, loss = train_step(hidden, optimizer_state)
            losses.append(float(loss))
            progress.update(bar, advance=1, loss=f"{losses[-1]:.3f}")
    before, after = losses[0], losses[-1]
    print(f"loss before {before:.3f}, after {after:.3f} nats per token")
    for name, state in (("before", empty), ("after", tuned(model, empty, tuned_hidden))):
        print(f"--- {name}\n{args.prompt}{model.tokenizer.decode(greedy(model, state, prompt, args.tokens))}")
    return before, after


if __name__ == "__main__":
    main()

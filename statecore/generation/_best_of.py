"""Best of n: several futures from one point, of which one goes on."""

import dataclasses
import math
from collections.abc import Callable
from numbers import Real

import jax

from statecore._errors import LifecycleError, UnsupportedError
from statecore.generation._draft import Draft
from statecore.generation._generation import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Future:
    """One of several continuations.

    tokens: what it emitted from the point they share.
    text: of those tokens; None without a tokenizer.
    score: what futures are ordered by.
    """

    tokens: tuple[int, ...]
    text: str | None
    score: float


def mean_logprob(gen: Generation, num_tokens: int) -> float:
    """Returns the mean log-probability of the last `num_tokens` tokens, by the model."""
    return sum(gen.logprobs[-num_tokens:]) / num_tokens


def best_of_n(
    gen: Generation,
    n: int,
    num_tokens: int,
    *,
    seed: int | jax.Array | None = None,
    score: Callable[[Generation, int], float] = mean_logprob,
    speculate: Draft | None = None,
) -> list[Future]:
    """Runs `n` futures of a generation and leaves it in the best; returns all, the best first.

    The prompt is read once: each future is a branch, exchanged in and run. The others are
    dropped, and what they held of the budget is given back.

    Args:
      gen: of one sequence; made with `num_logprobs=0` for the default score.
      n: futures.
      num_tokens: the most tokens of each.
      seed: of the futures; the generation's own draws if None.
      score: `score(gen, num_new)` of a generation that has just emitted `num_new` tokens;
        greater is better.
      speculate: a draft, as in `run`.

    Raises:
      UnsupportedError: several sequences, or the default score without log-probabilities.
      BudgetError: the branches exceed a limit; nothing has run.
      LifecycleError: a future was paused or cancelled before its first token.
    """
    if gen.runtime.geometry.batch != 1:
        raise UnsupportedError(f"best_of_n is of one text, but the generation has {gen.runtime.geometry.batch}.")
    if score is mean_logprob and not gen.keeps_logprobs:
        raise UnsupportedError("The mean log-probability needs `Generation(num_logprobs=0)`, or give a `score`.")
    start = len(gen.tokens)
    branches = gen.fork(gen.snapshot(), n=n, seed=seed)
    futures = []
    for branch in branches:
        gen.exchange(branch)
        try:
            num_new = len(gen.run(num_tokens, speculate=speculate))
            if not num_new:
                raise LifecycleError(f"A future emitted nothing: on a request, the run is {gen.status.value}.")
            tokenizer, new = gen.runtime.model.tokenizer, gen.tokens[start:]
            text = None if tokenizer is None else tokenizer.decode(new)
            scored = score(gen, num_new)
            if not isinstance(scored, Real) or math.isnan(scored):
                raise UnsupportedError(f"A future's score is {scored!r}, which cannot be compared with the others'.")
            futures.append(Future(tokens=tuple(new), text=text, score=float(scored)))
        finally:
            gen.exchange(branch)
    order = sorted(range(n), key=lambda number: -futures[number].score)
    gen.exchange(branches[order[0]])
    return [futures[number] for number in order]

"""How a run begins: from what a user gives to a run that has emitted nothing."""

from collections.abc import Collection, Sequence
from numbers import Integral

import jax

from statecore._errors import CapacityError, GeometryError, UnsupportedError
from statecore.backend import checks
from statecore.generation._boundary import BoundarySaves
from statecore.generation._constraint import Constraint
from statecore.generation._forced import Forced
from statecore.generation._guard import LoopGuard
from statecore.generation._row import Row, first_ending
from statecore.generation._run import Run, RunId
from statecore.generation._sampler import Sampler, key_of
from statecore.generation._sampler_state import initial_state
from statecore.generation._stops import OutputText, Stops
from statecore.generation._stops import stop_strings as checked_strings
from statecore.generation._stops import stop_tokens as checked_tokens
from statecore.runtime import Runtime
from statecore.store import PrefixCache

_CONSTRAINT = ("mask", "advance", "copy", "nbytes", "is_complete")


def start_run(
    runtime: Runtime,
    prompts: list[list[int]],
    *,
    sampler: Sampler,
    seed: int | jax.Array | None,
    max_tokens: int | None,
    stop_tokens: Collection[int],
    stop_strings: Collection[str],
    constraint: Constraint | Sequence[Constraint | None] | None,
    num_logprobs: int | None,
    saves: BoundarySaves | None,
    guard: LoopGuard | None,
) -> Run:
    """Returns a run over `prompts`; checks everything and touches nothing."""
    key = None if seed is None else key_of(seed)
    runtime.check_prompt(prompts)
    sampling = initial_state(sampler, key, prompts, [[] for _ in prompts], runtime.vocab_size)
    tokenizer = runtime.model.tokenizer
    stops = Stops(
        strings=checked_strings(stop_strings, tokenizer), tokens=checked_tokens(stop_tokens, runtime.vocab_size)
    )
    constraints = _constraints(constraint, len(prompts), runtime.vocab_size)
    if num_logprobs is not None:
        checks.whole(num_logprobs, "num_logprobs")
        if num_logprobs > runtime.vocab_size:
            raise UnsupportedError(f"num_logprobs is {num_logprobs}, but there are {runtime.vocab_size} tokens.")
    pairs = zip(prompts, constraints, strict=True)
    return Run(
        rows=[_row(prompt, first_ending(stops, tokenizer), one) for prompt, one in pairs],
        sampler=sampler,
        sampling=sampling,
        forced=Forced.none(len(prompts)),
        stops=stops,
        max_tokens=_checked_length(runtime, prompts, max_tokens),
        run_id=RunId(),
        num_logprobs=num_logprobs,
        saves=saves,
        guard=guard,
    )


def check_kinds(
    *, runtime: Runtime, sampler: Sampler | None, prefix_cache: PrefixCache | None, guard: LoopGuard | None
) -> None:
    """Raises UnsupportedError for an argument that is something else altogether."""
    wanted = (
        ("runtime", runtime, Runtime),
        ("sampler", sampler, Sampler),
        ("prefix_cache", prefix_cache, PrefixCache),
        ("guard", guard, LoopGuard),
    )
    for name, value, kind in wanted:
        is_left_out = value is None and kind is not Runtime
        if not is_left_out and not isinstance(value, kind):
            raise UnsupportedError(f"`{name}` must be a {kind.__name__}, but is {value!r}.")
    if guard is not None:
        checks.whole(guard.max_period, "max_period of the guard", least=1)
        checks.whole(guard.num_repeats, "num_repeats of the guard", least=2)


def _row(prompt: list[int], ending: OutputText, grammar: Constraint | None) -> Row:
    constraint = None if grammar is None else grammar.copy()
    return Row(prompt=prompt, ending=ending, constraint=constraint, grammar=grammar)


def _constraints(
    given: Constraint | Sequence[Constraint | None] | None, batch: int, vocab_size: int
) -> list[Constraint | None]:
    rows = list(given) if isinstance(given, Sequence) else [given] * batch
    if len(rows) != batch:
        raise GeometryError(f"{len(rows)} constraints were given for {batch} sequences; give one, or one for each.")
    for number, row in enumerate(rows):
        missing = [] if row is None else [f"`{name}`" for name in _CONSTRAINT if not hasattr(row, name)]
        if missing:
            raise UnsupportedError(
                f"A constraint has `mask` and `advance`, `copy`, `nbytes` and `is_complete`, but the "
                f"{type(row).__name__} of sequence {number} lacks {', '.join(missing)}."
            )
        if row is not None and row.is_complete:
            raise UnsupportedError(f"The constraint of sequence {number} is complete already, so no token may follow.")
        if row is not None and len(row.mask()) != vocab_size:
            raise GeometryError(
                f"The constraint of sequence {number} masks {len(row.mask())} tokens, but the model has {vocab_size}. "
                "Was it made for another tokenizer?"
            )
    return [None if row is None else row.copy() for row in rows]


def check_max_tokens(runtime: Runtime, run: Run, max_tokens: int | None) -> int:
    """Returns the limit of a fork of `run`; raises CapacityError if it is too low or does not fit."""
    if max_tokens is None:
        return run.max_tokens
    most = _checked_length(runtime, run.prompts, max_tokens)
    if most < run.num_emitted:
        raise CapacityError(f"max_tokens is {most}, but the snapshot has emitted {run.num_emitted} already.")
    return most


def _checked_length(runtime: Runtime, rows: list[list[int]], max_tokens: int | None) -> int:
    """Returns the tokens to emit; the last one emitted never enters the state."""
    longest = max(len(row) for row in rows)
    is_whole = isinstance(max_tokens, Integral) and not isinstance(max_tokens, bool)
    if max_tokens is not None and not (is_whole and max_tokens >= 1):
        raise CapacityError(f"max_tokens is {max_tokens}, but must be a whole number of at least 1.")
    capacity = runtime.token_capacity
    if capacity is None:
        if max_tokens is None:
            raise CapacityError("This model's state has no capacity to fill; say `max_tokens`.")
        return max_tokens
    room = capacity - (longest - 1)
    wanted = 1 if max_tokens is None else max_tokens
    if wanted > room:
        raise CapacityError(
            f"A prompt of {longest} tokens and {wanted} more need a capacity of {longest - 1 + wanted}, but the "
            f"runtime has {capacity}. Make a runtime of a larger capacity."
        )
    return room if max_tokens is None else max_tokens

"""One sequence of a run: its tokens, and what decides where it ends."""

import dataclasses
import enum
from collections.abc import Callable

from statecore.backend import Tokenizer
from statecore.generation._constraint import Constraint
from statecore.generation._stops import OutputText, Stops
from statecore.generation._text import TextStream


class Finish(enum.Enum):
    """Why a sequence has ended."""

    LENGTH = "length"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    CONSTRAINT = "constraint"
    LOOP = "loop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What a sequence would be after some tokens; nothing has changed yet.

    num_tokens: of those offered, up to where the sequence ends.
    finish: why it ends there; None if it goes on.
    ending: what stops have seen by then.
    constraint: after those tokens.
    """

    num_tokens: int
    finish: Finish | None
    ending: OutputText
    constraint: Constraint | None


def first_ending(stops: Stops, tokenizer: Tokenizer | None) -> OutputText:
    """Returns what stops have seen of an empty output; text is decoded only where stop strings look at it."""
    stream = TextStream(tokenizer=tokenizer) if stops.strings.strings and tokenizer is not None else None
    return OutputText(stream=stream, stops=stops)


@dataclasses.dataclass(kw_only=True)
class Row:
    """One sequence of a run. The state holds `prompt + output` less the last token.

    prompt: its tokens.
    ending: what stops have seen of the output. Immutable.
    output: tokens emitted so far.
    constraint: what the next token may be; None for any.
    grammar: the constraint as it was at first, to come back to; never advanced.
    finish: why it has ended; None while it goes on.
    logprobs: of the tokens emitted, by the model; empty unless asked for.
    top: the likeliest tokens at each place and their log-probabilities; empty unless asked for.
    """

    prompt: list[int]
    ending: OutputText
    output: list[int] = dataclasses.field(default_factory=list)
    constraint: Constraint | None = None
    grammar: Constraint | None = None
    finish: Finish | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)

    def copy(self) -> "Row":
        """Returns an independent copy."""
        constraint = None if self.constraint is None else self.constraint.copy()
        lists = {name: list(getattr(self, name)) for name in ("output", "logprobs", "top")}
        return dataclasses.replace(self, constraint=constraint, **lists)

    @property
    def pending(self) -> int:
        """The last token: emitted, not yet in the state."""
        return (self.output or self.prompt)[-1]

    @property
    def state_length(self) -> int:
        """Tokens of this sequence that the state must hold."""
        return len(self.prompt) + len(self.output) - 1

    def look_ahead(
        self, tokens: list[int], max_tokens: int, breaks_at: Callable[[list[int]], bool] | None = None
    ) -> Taken:
        """Returns what taking `tokens` one by one would come to, up to its end or where `breaks_at` is true."""
        ending, finish, num_tokens = self.ending, None, 0
        constraint = None if self.constraint is None else self.constraint.copy()
        for token in tokens:
            num_tokens += 1
            ending, _ = ending.push(token)
            if constraint is not None:
                constraint.advance(token)
            if ending.finish is not None:
                finish = Finish(ending.finish)
            elif constraint is not None and constraint.is_complete:
                finish = Finish.CONSTRAINT
            elif len(self.output) + num_tokens == max_tokens:
                finish = Finish.LENGTH
            if finish is not None or (breaks_at is not None and breaks_at([*self.output, *tokens[:num_tokens]])):
                break
        return Taken(num_tokens=num_tokens, finish=finish, ending=ending, constraint=constraint)

    def take(self, tokens: list[int], taken: Taken) -> None:
        """Appends what `look_ahead` has taken of `tokens`."""
        self.ending, self.constraint, self.finish = taken.ending, taken.constraint, taken.finish
        # Last, since the length is what the state is held against: an interrupt before it is noticed.
        self.output += tokens[: taken.num_tokens]

    def cut(self, num_tokens: int) -> None:
        """Goes back to the first `num_tokens` of the output; ending and constraint see them anew."""
        del self.output[num_tokens:], self.logprobs[num_tokens:], self.top[num_tokens:]
        self.ending = first_ending(
            self.ending.stops, None if self.ending.stream is None else self.ending.stream.tokenizer
        )
        self.constraint = None if self.grammar is None else self.grammar.copy()
        taken = self.look_ahead(self.output, len(self.output) + 1)
        self.ending, self.constraint, self.finish = taken.ending, taken.constraint, None

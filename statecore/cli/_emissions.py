"""Who emitted which tokens of a speculative text, from what the draft proposed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import statecore as sc
from statecore.display import Emission


@dataclasses.dataclass(frozen=True)
class RecordedDraft:
    """A draft that remembers what it proposed, by the length of the text it was shown."""

    draft: sc.Draft
    proposals: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    @property
    def num_draft(self) -> int:
        """The most tokens guessed at once."""
        return self.draft.num_draft

    def propose(self, history: Sequence[int], limit: int) -> list[int]:
        """Returns what the draft proposes."""
        proposed = self.draft.propose(history, limit)
        self.proposals[len(history)] = proposed
        return proposed


def emissions_of(
    proposals: dict[int, list[int]], num_prompt: int, tokens: list[int], model: sc.Model
) -> list[dict[str, Any]]:
    """Returns the emissions of one text in order, as `Emission` takes them.

    A verify emits the guesses that are what the text goes on with, and one token more.

    Args:
      proposals: by the length of prompt and text, what was guessed there.
      num_prompt: tokens of the prompt.
      tokens: the text's.
      model: whose tokenizer decodes it.
    """
    emissions, start = [], 0
    while start < len(tokens):
        guesses = proposals.get(num_prompt + start, [])
        right = [guess == token for guess, token in zip(guesses, tokens[start:], strict=False)]
        accepted = (right + [False]).index(False)
        end = start + accepted + 1
        text = _text(model, tokens, start, end)
        item = Emission(num_drafted=len(guesses), num_accepted=accepted, num_tokens=end - start, text=text)
        emissions.append(dataclasses.asdict(item))
        start = end
    return emissions


def _text(model: sc.Model, tokens: list[int], start: int, end: int) -> str:
    """Returns the text of some tokens; a character belongs to where its first byte is."""
    assert model.tokenizer is not None
    before = len(model.tokenizer.decode(tokens[:start]))
    return model.tokenizer.decode(tokens)[before : len(model.tokenizer.decode(tokens[:end]))]

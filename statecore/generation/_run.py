"""One logical run of a generation: everything but the state of the model."""

import dataclasses

import jax
import numpy as np

from statecore._identity import Mark
from statecore.backend import Tokenizer
from statecore.generation._sampler import Sampler


class RunId(Mark):
    """Marks one logical run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """What speculation has done so far in a run.

    num_verifies: windows verified, counted once a sequence that had rows in it.
    num_tokens: tokens those windows emitted.
    num_drafted: draft tokens verified.
    num_accepted: draft tokens accepted.
    """

    num_verifies: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens a verify emits; 1 is what plain decoding does. NaN before the first."""
        return self.num_tokens / self.num_verifies if self.num_verifies else float("nan")


@dataclasses.dataclass(kw_only=True)
class Run:
    """The semantic half of a generation. The state holds `prompt + output` less the last token.

    prompts: tokens of each sequence's prompt.
    outputs: tokens emitted so far, of equal number in all sequences.
    sampler: how tokens are chosen.
    key: of the draws.
    max_tokens: tokens to emit in all, for each sequence.
    run_id: which logical run this is; a snapshot can only be restored into its own.
    speculation: counts so far.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    sampler: Sampler
    key: jax.Array
    max_tokens: int
    run_id: RunId
    speculation: Speculation = Speculation()

    def copy(self, **changes) -> "Run":
        """Returns an independent copy with some fields changed."""
        outputs = [list(row) for row in self.outputs]
        return dataclasses.replace(self, outputs=outputs, **changes)

    @property
    def num_emitted(self) -> int:
        """Tokens emitted so far, for each sequence."""
        return min(len(row) for row in self.outputs)

    @property
    def num_left(self) -> int:
        """Tokens still to emit, for each sequence."""
        return self.max_tokens - self.num_emitted

    def pending(self) -> np.ndarray:
        """Returns the last token of each sequence, `[B]`: emitted, not yet in the state."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return np.array([(output or prompt)[-1] for prompt, output in pairs], np.int32)

    def state_lengths(self) -> np.ndarray:
        """Returns how many tokens of each sequence the state must hold, `[B]`."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return np.array([len(prompt) + len(output) - 1 for prompt, output in pairs])

    def text(self, tokenizer: Tokenizer) -> list[str]:
        """Returns the text emitted by each sequence."""
        return [tokenizer.decode(row) for row in self.outputs]

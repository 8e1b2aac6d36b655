"""Drafts by the model itself, with some of its layers left out (arXiv 2309.08168)."""

import dataclasses
import functools
from typing import Any

import numpy as np

from statecore.backend import Model
from statecore.generation import Drawing, Proposal
from statecore.runtime import Runtime
from statecore.speculative._following import Following
from statecore.speculative._model_draft import ModelDraft


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SelfDraft:
    """Guesses what the model would write if some of its layers did nothing.

    The parameters are the model's own, not copied. The layers that guess keep a state of their
    own, so that no plane of the model's state is touched by a guess.

    model: which guesses for itself; a decoder of the families, or any model that has `layers`.
    skip: layers left out.
    num_draft, acceptance: as of `ModelDraft`.
    """

    model: Model
    skip: tuple[int, ...]
    num_draft: int = 4
    acceptance: str = "sampled"

    @functools.cached_property
    def thinned(self) -> ModelDraft:
        """The draft by the model without the skipped layers."""
        model = self.model.without_layers(self.skip)
        return ModelDraft(model=model, num_draft=self.num_draft, acceptance=self.acceptance)

    @property
    def rule(self) -> Any:
        """As of `ModelDraft`."""
        return self.thinned.rule

    @property
    def is_lossless(self) -> bool:
        """As of `ModelDraft`."""
        return self.thinned.is_lossless

    def check(self, runtime: Runtime) -> None:
        """As of `ModelDraft`; and raises UnsupportedError or GeometryError for layers that cannot be skipped."""
        self.thinned.check(runtime)

    def propose_rows(self, state: Following | None, drawing: Drawing) -> tuple[Following, Proposal]:
        """As of `ModelDraft`."""
        return self.thinned.propose_rows(state, drawing)

    def settle(self, state: Following, num_rows: np.ndarray) -> Following:
        """As of `ModelDraft`."""
        return self.thinned.settle(state, num_rows)

"""A loaded model: a backend, its parameters, a tokenizer, and which load it was."""

import dataclasses
from typing import Protocol

from statecore._identity import Mark
from statecore._typing import PyTree
from statecore.backend._backend import Backend
from statecore.state import Geometry


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Load(Mark):
    """Marks one load of a model. Two loads of the same files are two identities."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a slot belongs to: one load, at one version of its weights.

    load: compared by identity.
    weights_epoch: how often the weights were replaced.
    """

    load: Load
    weights_epoch: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A loaded model.

    name: for messages.
    backend: its functions.
    params: what the backend's functions take as `params`.
    tokenizer: None for a model without text.
    identity: fresh for each load.
    """

    name: str
    backend: Backend
    params: PyTree
    tokenizer: Tokenizer | None = None
    identity: Identity = dataclasses.field(default_factory=lambda: Identity(load=Load()))

    def geometry(self, *, batch: int = 1, capacity: int) -> Geometry:
        """Returns the geometry that every state of this model has; allocates nothing."""
        return self.backend.geometry(self.params, batch=batch, capacity=capacity)

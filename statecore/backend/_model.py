"""A loaded model: a backend, its parameters, a tokenizer, and which load it was."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Protocol, Self

from statecore._errors import GeometryError, UnsupportedError
from statecore._identity import Mark
from statecore._typing import PyTree
from statecore.backend._backend import Backend
from statecore.state import Geometry


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Layers(Protocol):
    """What a model is built of, where it can be built without some of it."""

    @property
    def num_layers(self) -> int: ...

    def without(self, skipped: tuple[int, ...]) -> tuple[Backend, Callable[[PyTree], PyTree]]:
        """Returns the backend without some layers, and what takes the model's parameters to its own."""
        ...


class Load(Mark):
    """Marks one load of a model. Two loads of the same files are two identities."""

    def __init__(self) -> None:
        self._epochs = itertools.count(1)

    def next_epoch(self) -> int:
        """Returns a weights epoch that this load has not had, whichever model of it asks."""
        return next(self._epochs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a slot belongs to: one load, at one version of its weights.

    load: compared by identity.
    weights_epoch: which weights: 0 as loaded, and another number for each replacement.
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
    stop_tokens: which end a text, as the model's files say.
    identity: fresh for each load.
    layers: for `without_layers`; None for a model that is of one piece.
    """

    name: str
    backend: Backend
    params: PyTree
    tokenizer: Tokenizer | None = None
    stop_tokens: tuple[int, ...] = ()
    identity: Identity = dataclasses.field(default_factory=lambda: Identity(load=Load()))
    layers: Layers | None = None

    def geometry(self, *, batch: int = 1, capacity: int) -> Geometry:
        """Returns the geometry that every state of this model has; allocates nothing."""
        return self.backend.geometry(self.params, batch=batch, capacity=capacity)

    def without_layers(self, skipped: Sequence[int]) -> "Model":
        """Returns a model that runs all layers but `skipped`, with this model's parameters, not copied.

        It is a load of its own, with states of its own.

        Raises:
          UnsupportedError: the model is of one piece, or all layers are skipped.
          GeometryError: there is no such layer.
        """
        if self.layers is None:
            raise UnsupportedError(f"{self.name} is of one piece: it does not say of which layers it is built.")
        total = self.layers.num_layers
        wrong = [layer for layer in skipped if not (isinstance(layer, Integral) and 0 <= layer < total)]
        if wrong:
            raise GeometryError(f"{self.name} has no layer {wrong[0]!r}: its layers are 0 to {total - 1}.")
        if len(set(skipped)) == total:
            raise UnsupportedError(f"All {total} layers of {self.name} would be skipped, and nothing be left to run.")
        backend, chosen = self.layers.without(tuple(sorted({int(layer) for layer in skipped})))
        return Model(name=f"{self.name} thinned", backend=backend, params=chosen(self.params), tokenizer=self.tokenizer)

    def with_params(self, params: PyTree) -> Self:
        """Returns this model with other weights, in a weights epoch of its own.

        Slots of the old weights are refused by a runtime of the new ones: a state is what
        its weights made of the tokens.
        """
        epoch = self.identity.load.next_epoch()
        return dataclasses.replace(self, params=params, identity=Identity(load=self.identity.load, weights_epoch=epoch))

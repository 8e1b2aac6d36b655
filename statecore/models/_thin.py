"""A decoder without some of its layers, over the same parameters."""

import dataclasses
from collections.abc import Callable

from jax.typing import DTypeLike

from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.models._decoder import Decoder, layer_name
from statecore.models._planes import decoder_backend


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderLayers:
    """The layers of a decoder; see `statecore.Model.without_layers`."""

    decoder: Decoder
    dtype: DTypeLike

    @property
    def num_layers(self) -> int:
        """How many there are."""
        return len(self.decoder.layers)

    def without(self, skipped: tuple[int, ...]) -> tuple[Backend, Callable[[PyTree], PyTree]]:
        """Returns the backend without the layers `skipped`, and what chooses its parameters."""
        kept = [number for number in range(self.num_layers) if number not in skipped]
        thin = dataclasses.replace(self.decoder, layers=tuple(self.decoder.layers[number] for number in kept))

        def chosen(params: PyTree) -> PyTree:
            layers = {layer_name(i): params["layers"][layer_name(number)] for i, number in enumerate(kept)}
            return params | {"layers": layers}

        return decoder_backend(thin, self.dtype), chosen

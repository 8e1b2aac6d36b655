"""A family: from a configuration to a decoder, and from a decoder to the names of its tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from statecore.models._decoder import Decoder
from statecore.models.families._options import Options
from statecore.models.families._sources import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    name: as `model_type` in a configuration has it.
    read: `read(options) -> Decoder`, which takes every option that it understands.
    tensors: `tensors(decoder) -> Table`, the explicit names of the file's tensors.
    unused: names of tensors that files carry and no decoder reads: their beginnings, with a
      dot at the end, or their ends.
    """

    name: str
    read: Callable[[Options], Decoder]
    tensors: Callable[[Decoder], Table]
    unused: tuple[str, ...] = ()

    def decoder(self, config: Mapping[str, Any]) -> Decoder:
        """Returns the decoder of a configuration.

        Raises:
          LoadError: an option is missing, wrong or not implemented; the message names it.
        """
        options = Options(config, self.name)
        decoder = self.read(options)
        options.done()
        return decoder

"""The mixers of all families, one a file, and the blocks that they share."""

from statecore.models.mixers._attention import Attention as Attention
from statecore.models.mixers._gated_delta import GatedDelta as GatedDelta
from statecore.models.mixers._initial import initial as initial
from statecore.models.mixers._layers import Norm as Norm
from statecore.models.mixers._mamba2 import Mamba2 as Mamba2
from statecore.models.mixers._mixer import Chunk as Chunk
from statecore.models.mixers._mixer import Mixer as Mixer
from statecore.models.mixers._mixer import Param as Param
from statecore.models.mixers._mixer import PlaneSpec as PlaneSpec
from statecore.models.mixers._mla import LatentAttention as LatentAttention
from statecore.models.mixers._mlp import Mlp as Mlp
from statecore.models.mixers._moe import Moe as Moe
from statecore.models.mixers._rope import Rope as Rope
from statecore.models.mixers._short_conv import ShortConv as ShortConv

__all__ = [
    "Attention", "Chunk", "GatedDelta", "LatentAttention", "Mamba2", "Mixer", "Mlp", "Moe", "Norm", "Param",
    "PlaneSpec", "Rope", "ShortConv", "initial",
]  # fmt: skip

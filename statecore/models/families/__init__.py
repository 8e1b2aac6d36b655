"""Model families: what each configuration means, and under which names its file has the parameters."""

from statecore.models.families import (
    _bamba,
    _deepseek_v3,
    _falcon_h1,
    _gemma3,
    _granite,
    _lfm2,
    _llama,
    _mamba2,
    _nemotron_h,
    _qwen3_next,
)
from statecore.models.families._family import Family as Family
from statecore.models.families._options import Options as Options
from statecore.models.families._options import shown as shown
from statecore.models.families._sources import Source as Source
from statecore.models.families._sources import Table as Table

_MODULES = (_bamba, _deepseek_v3, _falcon_h1, _gemma3, _granite, _lfm2, _llama, _mamba2, _nemotron_h, _qwen3_next)

FAMILIES: dict[str, Family] = {family.name: family for module in _MODULES for family in module.FAMILIES}

__all__ = ["FAMILIES", "Family", "Options", "Source", "Table", "shown"]

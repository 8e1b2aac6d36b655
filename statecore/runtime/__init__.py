"""A loaded model with one installed state, its slots, and faults on purpose."""

from statecore.runtime import faults as faults
from statecore.runtime._installed import Support as Support
from statecore.runtime._runtime import Runtime as Runtime
from statecore.runtime._slot import Slot as Slot

__all__ = ["Runtime", "Slot", "Support", "faults"]

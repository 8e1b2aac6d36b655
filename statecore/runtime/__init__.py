"""A loaded model with one installed state."""

from statecore.runtime._runtime import Runtime as Runtime
from statecore.runtime._runtime import Support as Support
from statecore.runtime._slot import Slot as Slot

__all__ = ["Runtime", "Slot", "Support"]

"""The state of a generating language model, as a value."""

from importlib.metadata import version as _version

from statecore import ssm as ssm
from statecore._errors import AliasError as AliasError
from statecore._errors import BudgetError as BudgetError
from statecore._errors import CapacityError as CapacityError
from statecore._errors import FencedError as FencedError
from statecore._errors import GeometryError as GeometryError
from statecore._errors import IdentityError as IdentityError
from statecore._errors import LifecycleError as LifecycleError
from statecore._errors import LoadError as LoadError
from statecore._errors import NonFiniteError as NonFiniteError
from statecore._errors import RefusedError as RefusedError
from statecore._errors import RollbackError as RollbackError
from statecore._errors import StateConsumedError as StateConsumedError
from statecore._errors import StateError as StateError
from statecore._errors import UnsupportedError as UnsupportedError
from statecore.backend import Backend as Backend
from statecore.backend import Model as Model
from statecore.backend import Registry as Registry
from statecore.backend import Window as Window
from statecore.backend import clear_refusal as clear_refusal
from statecore.backend import commit as commit
from statecore.backend import default_registry as default_registry
from statecore.backend import differing_planes as differing_planes
from statecore.backend import equal as equal
from statecore.backend import extend as extend
from statecore.backend import is_refused as is_refused
from statecore.backend import load as load
from statecore.backend import put_rows as put_rows
from statecore.backend import step as step
from statecore.backend import take_rows as take_rows
from statecore.backend import verify as verify
from statecore.generation import Constraint as Constraint
from statecore.generation import Draft as Draft
from statecore.generation import Finish as Finish
from statecore.generation import Generation as Generation
from statecore.generation import LoopGuard as LoopGuard
from statecore.generation import Mirostat as Mirostat
from statecore.generation import Sampler as Sampler
from statecore.generation import Status as Status
from statecore.generation import beam_search as beam_search
from statecore.generation import best_of_n as best_of_n
from statecore.native import Estimate as Estimate
from statecore.native import SnapshotBudget as SnapshotBudget
from statecore.native import SnapshotLimits as SnapshotLimits
from statecore.native import capture as capture
from statecore.native import copy as copy
from statecore.native import estimate as estimate
from statecore.native import estimate_growth as estimate_growth
from statecore.native import exchange as exchange
from statecore.native import grow as grow
from statecore.runtime import Runtime as Runtime
from statecore.runtime import Slot as Slot
from statecore.speculative import NGramDraft as NGramDraft
from statecore.state import Geometry as Geometry
from statecore.state import Plane as Plane
from statecore.state import diff as diff
from statecore.state import interpolate as interpolate
from statecore.state import patch as patch
from statecore.state import planes as planes
from statecore.state import validate as validate
from statecore.store import PrefixCache as PrefixCache
from statecore.store import SnapshotPool as SnapshotPool

__version__ = _version("statecore")

__all__ = [
    "AliasError", "Backend", "BudgetError", "CapacityError", "Constraint", "Draft",
    "Estimate", "FencedError", "Finish", "Generation", "Geometry", "GeometryError",
    "IdentityError", "LifecycleError", "LoadError", "LoopGuard", "Mirostat", "Model",
    "NGramDraft", "NonFiniteError", "Plane", "PrefixCache", "RefusedError", "Registry",
    "RollbackError", "Runtime", "Sampler", "Slot", "SnapshotBudget", "SnapshotLimits",
    "SnapshotPool", "StateConsumedError", "StateError", "Status", "UnsupportedError",
    "Window", "beam_search", "best_of_n", "capture", "clear_refusal", "commit", "copy",
    "default_registry", "diff", "differing_planes", "equal", "estimate", "estimate_growth",
    "exchange", "extend", "grow", "interpolate", "is_refused", "load", "patch", "planes",
    "put_rows", "ssm", "step", "take_rows", "validate", "verify",
]  # fmt: skip

"""Backends: functions over a state, what is derived from them, transitions, registry."""

from statecore.backend import _checks as checks
from statecore.backend import _launch as launch
from statecore.backend._backend import Backend as Backend
from statecore.backend._model import Identity as Identity
from statecore.backend._model import Load as Load
from statecore.backend._model import Model as Model
from statecore.backend._model import Tokenizer as Tokenizer
from statecore.backend._registry import Registry as Registry
from statecore.backend._registry import default_registry as default_registry
from statecore.backend._registry import find_model as find_model
from statecore.backend._registry import load as load
from statecore.backend._transitions import check_mode as check_mode
from statecore.backend._transitions import checked_rows as checked_rows
from statecore.backend._transitions import clear_refusal as clear_refusal
from statecore.backend._transitions import commit as commit
from statecore.backend._transitions import differing_planes as differing_planes
from statecore.backend._transitions import equal as equal
from statecore.backend._transitions import extend as extend
from statecore.backend._transitions import is_refused as is_refused
from statecore.backend._transitions import put_rows as put_rows
from statecore.backend._transitions import step as step
from statecore.backend._transitions import take_rows as take_rows
from statecore.backend._transitions import verify as verify
from statecore.backend._window import Window as Window

__all__ = [
    "Backend", "Identity", "Load", "Model", "Registry", "Tokenizer", "Window",
    "check_mode", "checked_rows", "checks", "clear_refusal", "commit", "default_registry",
    "differing_planes", "equal", "extend", "find_model", "is_refused", "launch", "load", "put_rows",
    "step", "take_rows", "verify",
]  # fmt: skip

"""What a notebook asks a value for, answered by `statecore.display`."""

from importlib import import_module
from typing import Any


def notebook_html(function: str, *args: Any) -> str:
    """Returns the HTML of `statecore.display.<function>(*args)`.

    Display stands above every layer and is not imported with them, so it is looked up
    only when a notebook asks.
    """
    return getattr(import_module("statecore.display"), function)(*args).html

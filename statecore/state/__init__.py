"""What a state is: planes and their kinds, geometry, equality, rows."""

from statecore.state import _equality as equality
from statecore.state import planes as planes
from statecore.state._geometry import Geometry as Geometry
from statecore.state._geometry import PlaneGeometry as PlaneGeometry
from statecore.state._geometry import make_geometry as make_geometry
from statecore.state._geometry import state_geometry as state_geometry
from statecore.state._geometry import validate as validate
from statecore.state._layout import Layout as Layout
from statecore.state._layout import choose_row as choose_row
from statecore.state._layout import make_layout as make_layout
from statecore.state._layout import per_row as per_row
from statecore.state._layout import row_axis as row_axis
from statecore.state._layout import set_row as set_row
from statecore.state._layout import take_row as take_row
from statecore.state._rows import put as put
from statecore.state._rows import take as take
from statecore.state.planes import Plane as Plane

__all__ = [
    "Geometry", "Layout", "Plane", "PlaneGeometry", "choose_row", "equality", "make_geometry",
    "make_layout", "per_row", "planes", "put", "row_axis", "set_row", "state_geometry", "take",
    "take_row", "validate",
]  # fmt: skip

"""What a state is: planes and their kinds, geometry, equality, rows; naming, comparing and editing them."""

from statecore.state import _equality as equality
from statecore.state import planes as planes
from statecore.state._address import Part as Part
from statecore.state._address import find_part as find_part
from statecore.state._address import parts as parts
from statecore.state._diff import DIFF_HEADER as DIFF_HEADER
from statecore.state._diff import PartDiff as PartDiff
from statecore.state._diff import StateDiff as StateDiff
from statecore.state._diff import diff as diff
from statecore.state._diff import diff_cells as diff_cells
from statecore.state._edit import HasLayout as HasLayout
from statecore.state._edit import interpolate as interpolate
from statecore.state._edit import layout_of as layout_of
from statecore.state._edit import patch as patch
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
from statecore.state._marks import is_marked as is_marked
from statecore.state._marks import mark as mark
from statecore.state._notebook import notebook_html as notebook_html
from statecore.state._rows import put as put
from statecore.state._rows import take as take
from statecore.state.planes import Plane as Plane

__all__ = [
    "DIFF_HEADER", "Geometry", "HasLayout", "Layout", "Part", "PartDiff", "Plane", "PlaneGeometry", "StateDiff",
    "choose_row", "diff", "diff_cells", "equality", "find_part", "interpolate", "is_marked", "layout_of",
    "make_geometry", "make_layout", "mark", "notebook_html", "parts", "patch", "per_row", "planes", "put",
    "row_axis", "set_row", "state_geometry", "take", "take_row", "validate",
]  # fmt: skip

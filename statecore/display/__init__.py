"""States, geometries, branches and speculation to look at: text in a terminal, HTML in a notebook."""

from statecore.display._anatomy import anatomy as anatomy
from statecore.display._html import Markup as Markup
from statecore.display._html import View as View
from statecore.display._html import element as element
from statecore.display._html import joined as joined
from statecore.display._html import number as number
from statecore.display._html import table as table
from statecore.display._show import geometry_html as geometry_html
from statecore.display._show import show as show
from statecore.display._show import show_diff as show_diff
from statecore.display._show import show_geometry as show_geometry
from statecore.display._show import show_saved as show_saved
from statecore.display._show import show_sequence as show_sequence
from statecore.display._show import show_slot as show_slot
from statecore.display._speculation import Emission as Emission
from statecore.display._speculation import speculation_html as speculation_html
from statecore.display._speculation import telemetry_html as telemetry_html
from statecore.display._table import geometry_rows as geometry_rows
from statecore.display._table import geometry_table as geometry_table
from statecore.display._tree import TreeNode as TreeNode
from statecore.display._tree import run_nodes as run_nodes
from statecore.display._tree import show_runs as show_runs
from statecore.display._tree import show_tree as show_tree
from statecore.display._tree import tree_html as tree_html

__all__ = [
    "Emission", "Markup", "TreeNode", "View", "anatomy", "element", "geometry_html",
    "geometry_rows", "geometry_table", "joined", "number", "run_nodes", "show", "show_diff", "show_geometry",
    "show_runs", "show_saved", "show_sequence", "show_slot", "show_tree", "speculation_html",
    "table", "telemetry_html", "tree_html",
]  # fmt: skip

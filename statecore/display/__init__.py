"""States and geometries as text for people."""

from statecore.display._table import geometry_rows as geometry_rows
from statecore.display._table import geometry_table as geometry_table

__all__ = ["geometry_rows", "geometry_table"]

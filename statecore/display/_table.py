"""A geometry as a table for the terminal."""

from rich.table import Table

from statecore.state import Geometry


def geometry_table(geometry: Geometry) -> Table:
    """Returns a row a plane: path, kind, shape, dtype, bytes, and how it is undone."""
    title = f"State of {geometry.name}: batch {geometry.batch}, capacity {geometry.capacity}"
    table = Table("plane", "kind", "shape", "dtype", title=title)
    table.add_column("bytes", justify="right")
    table.add_column("undone by")
    for plane in geometry.planes:
        size = "unknown" if plane.nbytes is None else f"{plane.nbytes:,}"
        shape = "x".join(map(str, plane.shape))
        table.add_row(plane.path, plane.plane.kind, shape, str(plane.dtype), size, plane.plane.undone_by)
    return table

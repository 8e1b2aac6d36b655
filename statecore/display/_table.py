"""A geometry as rows of facts, and those as a table for the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from statecore.state import Geometry


def geometry_rows(geometry: Geometry) -> list[dict[str, Any]]:
    """Returns a dict a plane: path, kind, shape, dtype, bytes (None if unknown), and how it is undone."""
    return [
        {
            "path": plane.path,
            "kind": plane.plane.kind,
            "shape": list(plane.shape),
            "dtype": str(plane.dtype),
            "bytes": plane.nbytes,
            "undone_by": plane.plane.undone_by,
        }
        for plane in geometry.planes
    ]


def geometry_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns the rows of `geometry_rows` as a table."""
    table = Table("plane", "kind", "shape", "dtype", title=title)
    table.add_column("bytes", justify="right")
    table.add_column("undone by")
    for row in rows:
        size = "unknown" if row["bytes"] is None else f"{row['bytes']:,}"
        shape = "x".join(map(str, row["shape"]))
        table.add_row(row["path"], row["kind"], shape, row["dtype"], size, row["undone_by"])
    return table

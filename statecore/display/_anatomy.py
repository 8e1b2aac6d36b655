"""A state drawn to scale: a bar a plane, as long as its bytes, cut into its layers.

What is filled is used: rows of append planes up to the length, rows of a ring that were
written. A dark line in a ring is where the next row goes. One strip a sequence.
"""

from collections.abc import Sequence

from statecore.display._html import Markup, element, size, svg
from statecore.state import Geometry, PlaneGeometry

COLORS = {
    "position": "#8a8f98", "append": "#3b82c4", "sliding": "#2a9d8f", "shift": "#d9822b",
    "recurrent": "#c2497a", "constant": "#9a8f7a", "opaque": "#7d5fc4",
}  # fmt: skip
_LABEL, _BAR, _SIZE, _ROW, _HEIGHT = 130, 480, 130, 30, 20
# More strips than this would be thinner than a pixel or two.
_MOST_STRIPS = 8


def anatomy(geometry: Geometry, lengths: Sequence[int] | None = None) -> Markup:
    """Returns the picture of a state, or of any state of a geometry if no lengths are given.

    Args:
      geometry: of the state.
      lengths: tokens that each sequence holds.
    """
    largest = max((plane.nbytes or 0 for plane in geometry.planes), default=0)
    rows = [_plane(plane, lengths, largest, i * _ROW) for i, plane in enumerate(geometry.planes)]
    height = _ROW * len(geometry.planes) + 24
    return svg(
        _LABEL + _BAR + _SIZE, height, f"the planes of {geometry.name} by bytes", *rows, _legend(geometry, height)
    )


def _plane(plane: PlaneGeometry, lengths: Sequence[int] | None, largest: int, top: int) -> Markup:
    # A plane of a few bytes stays visible; its size is written beside it.
    width = max(3.0, _BAR * (plane.nbytes or 0) / largest) if largest else 3.0
    label = element("text", plane.path, x=_LABEL - 8, y=top + 15, text_anchor="end", font_size=13)
    layers = _layer_names(plane)
    each = width / len(layers)
    bars = [
        _layer(plane, name, lengths, _LABEL + i * each, top, each) for i, name in enumerate(layers[: int(width) or 1])
    ]
    note = element("text", size(plane.nbytes), x=_LABEL + width + 8, y=top + 15, font_size=12, fill_opacity=0.75)
    return element("g", label, *bars, note)


def _layer_names(plane: PlaneGeometry) -> list[str]:
    return [f"layers.{i}.{plane.path}" for i in plane.plane.layers or ()] or [plane.path]


def _layer(
    plane: PlaneGeometry, name: str, lengths: Sequence[int] | None, left: float, top: int, width: float
) -> Markup:
    """Returns one layer's bar: an outline, and a strip a sequence filled as far as it is used."""
    color, used = COLORS[plane.plane.kind], _used(plane, lengths)
    height = _HEIGHT / len(used)
    strips = [
        element("rect", x=left, y=top + i * height, width=width * share, height=height, fill=color, fill_opacity=0.85)
        for i, share in enumerate(used)
    ]
    frame = element("rect", x=left, y=top, width=width, height=_HEIGHT, fill=color, fill_opacity=0.18, stroke=color)
    return element(
        "g", element("title", _told(plane, name, lengths)), frame, *strips, *_heads(plane, lengths, left, top, width)
    )


def _rows(plane: PlaneGeometry) -> int | None:
    """Returns how many rows an append or sliding plane has."""
    if plane.plane.kind not in ("append", "sliding") or plane.plane.axis is None:
        return None
    return plane.shape[plane.plane.axis]


def _used(plane: PlaneGeometry, lengths: Sequence[int] | None) -> list[float]:
    """Returns what share of the plane each sequence uses; one share if it cannot differ."""
    rows = _rows(plane)
    if rows is None:
        return [1.0]
    if not lengths:
        return [0.0]
    shares = [min(1.0, length / rows) if rows else 0.0 for length in lengths]
    return shares if len(shares) <= _MOST_STRIPS else [sum(shares) / len(shares)]


def _heads(plane: PlaneGeometry, lengths: Sequence[int] | None, left: float, top: int, width: float) -> list[Markup]:
    """Returns a line a sequence at the row of a ring that is written next."""
    rows = _rows(plane)
    if plane.plane.kind != "sliding" or not rows or not lengths or len(lengths) > _MOST_STRIPS:
        return []
    height = _HEIGHT / len(lengths)
    marks = []
    for i, length in enumerate(lengths):
        x, y = left + width * (length % rows) / rows, top + i * height
        marks.append(element("line", x1=x, x2=x, y1=y, y2=y + height, stroke="currentColor", stroke_width=2))
    return marks


def _told(plane: PlaneGeometry, name: str, lengths: Sequence[int] | None) -> str:
    said = f"{name}: {plane.plane.kind}, {plane.describe()}, undone by {plane.plane.undone_by}"
    rows = _rows(plane)
    if rows is None or lengths is None:
        return said
    if plane.plane.kind == "append":
        return f"{said}; rows used {', '.join(f'{length} of {rows}' for length in lengths)}"
    return f"{said}; next row {', '.join(f'{length % rows} of {rows}' for length in lengths)}"


def _legend(geometry: Geometry, height: int) -> Markup:
    kinds = list(dict.fromkeys(plane.plane.kind for plane in geometry.planes))
    items = []
    for i, kind in enumerate(kinds):
        x = _LABEL + i * 84
        items.append(element("rect", x=x, y=height - 14, width=10, height=10, fill=COLORS[kind]))
        items.append(element("text", kind, x=x + 14, y=height - 5, font_size=11))
    return element("g", *items)

"""HTML without a template engine: elements that escape what they are given.

Nothing made here refers to anything outside of itself. Colors are mid-tones that read on
light and on dark; text and lines take the color of the text around them.
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = {"br", "hr", "rect", "line", "circle", "path", "meta", "col"}


class Markup(str):
    """Text that is HTML already, so it is not escaped again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Something to look at: `text` in a terminal, `html` in a notebook."""

    text: str
    html: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Returns `<tag attributes>children</tag>`, all text escaped.

    Args:
      tag: the element's name.
      children: texts, which are escaped, and `Markup`, which is not.
      attributes: `fill_opacity=0.5` is `fill-opacity="0.5"`, `class_` is `class`; None is left out.
    """
    given = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    if tag in _VOID:
        return Markup(f"<{tag}{given}/>")
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def joined(children: Iterable[object]) -> Markup:
    """Returns children one after the other, texts escaped."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(str(child)) for child in children))


def svg(width: float, height: float, label: str, *children: object) -> Markup:
    """Returns a picture that shrinks with its page; `label` says what it shows."""
    # A margin above and below, for lines that lie on the edge.
    return element(
        "svg", *children, viewBox=f"0 -2 {_value(width)} {_value(height + 4)}", width=width, height=height + 4,
        role="img", aria_label=label, style="max-width:100%;height:auto;font-family:sans-serif", fill="currentColor",
    )  # fmt: skip


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Iterable[int] = ()) -> Markup:
    """Returns a table; the columns `numeric` stand to the right."""
    right = set(numeric)

    def line(tag: str, cells: Sequence[object]) -> Markup:
        return element("tr", *[element(tag, cell, style=_cell(i in right)) for i, cell in enumerate(cells)])

    body = [line("td", row) for row in rows]
    return element(
        "table", element("thead", line("th", header)), element("tbody", *body), style="border-collapse:collapse"
    )


def number(path: str, value: Any, text: str | None = None) -> Markup:
    """Returns a number that says where in a report it stands: `<data class=path value=...>`."""
    return element("data", f"{value:,}" if text is None else text, class_=path, value=str(value))


def size(nbytes: int | None) -> str:
    """Returns bytes as text: exact, and what it is in greater units."""
    if nbytes is None:
        return "unknown"
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min(int(math.log(nbytes, 1024)), 4)
    return f"{nbytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def _name(key: str) -> str:
    return key if key == "viewBox" else key.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return html.escape(f"{value:.2f}" if isinstance(value, float) else str(value))


def _cell(is_right: bool) -> str:
    align = "right" if is_right else "left"
    return f"text-align:{align};padding:2px 10px 2px 0;vertical-align:top"

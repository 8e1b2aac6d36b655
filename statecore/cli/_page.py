"""The demo's report as one HTML file that needs nothing outside of itself.

Every number is in a `<data>` element whose class says where it stands in the JSON report.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statecore import __version__
from statecore.display import Emission, Markup, TreeNode, element, number, speculation_html, table, tree_html

if TYPE_CHECKING:
    from statecore.cli._demo import Report

# System colors, so that the page is light or dark as the reader's machine is.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid; }
td, th { border-bottom: 1px solid rgba(128,128,128,.35); }
pre { padding: .6rem; border: 1px solid rgba(128,128,128,.35); }
.ok { color: #2a9d8f; } .failed { color: #d1495b; font-weight: bold; }
"""


def page(report: "Report") -> str:
    """Returns the report as a whole HTML document."""
    sections = [
        _section("Checks", _checks(report)),
        _section("The state", _INTRO_STATE, _anatomy(report), _geometry(report.geometry)),
        _section("Branches of one moment", _tree(report)),
        _section("Speculation", *_speculation(report.speculation)),
        _section("Costs", *_costs(report.costs)),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width"),
        element("title", "statecore demo"),
        element("style", Markup(_STYLE)),
    )
    body = element("body", element("h1", "statecore demo"), element("p", f"Version {__version__}."), *sections)
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


_INTRO_STATE = element(
    "p",
    "One bar a plane, as long as its bytes, cut into its layers. What is filled is in use at the end of the first "
    "future; the line in a ring is the row that is written next.",
)


def _section(title: str, *parts: Markup) -> Markup:
    return element("section", element("h2", title), *parts)


def _checks(report: "Report") -> Markup:
    items = []
    for name, holds in report.checks.items():
        mark = element("span", "ok" if holds else "FAILED", class_="ok" if holds else "failed")
        items.append(element("li", mark, f" {name}", "" if holds else f": {report.details[name]}"))
    planted = f"The fault {report.injected} was planted." if report.injected else ""
    return element("div", element("ul", *items), element("p", planted))


def _anatomy(report: "Report") -> Markup:
    return Markup("") if report.anatomy is None else Markup(report.anatomy)


def _geometry(rows: Sequence[dict[str, Any]]) -> Markup:
    shown = []
    for i, row in enumerate(rows):
        shape = [number(f"geometry.{i}.shape.{axis}", extent) for axis, extent in enumerate(row["shape"])]
        parts = [part for extent in shape for part in (extent, " × ")][:-1]
        nbytes = "unknown" if row["bytes"] is None else number(f"geometry.{i}.bytes", row["bytes"])
        shown.append((row["path"], row["kind"], element("span", *parts), row["dtype"], nbytes, row["undone_by"]))
    return table(("plane", "kind", "shape", "dtype", "bytes", "undone by"), shown, numeric=(4,))


def _tree(report: "Report") -> Markup:
    if report.tree is None:
        return element("p", "The branches could not be made; see the checks.")
    texts = [
        element("div", element("h3", f"Future {i}"), element("pre", text))
        for i, text in enumerate(report.futures, start=1)
    ]
    rows = _tree_rows(report.tree, "tree", 0)
    facts = table(("run", "tokens", "bytes", "note"), rows, numeric=(1, 2))
    return element("div", tree_html(report.tree), facts, *texts)


def _tree_rows(node: TreeNode, path: str, depth: int) -> list[tuple]:
    nbytes = "unknown" if node.num_bytes is None else number(f"{path}.num_bytes", node.num_bytes)
    name = " " * 3 * depth + node.name + (" (running)" if node.is_running else "")
    rows = [(name, number(f"{path}.tokens", node.tokens), nbytes, node.note)]
    for i, child in enumerate(node.children):
        rows += _tree_rows(child, f"{path}.children.{i}", depth + 1)
    return rows


def _speculation(found: dict[str, Any]) -> list[Markup]:
    if not found:
        return [element("p", "Nothing was speculated; see the checks.")]

    def shown(name: str) -> Markup:
        return number(f"speculation.{name}", found[name])

    told = element(
        "p", shown("num_verifies"), " verifies emitted ", shown("num_tokens"), " of ", shown("text_tokens"),
        " tokens, ", shown("tokens_per_verify"), " a verify: of ", shown("num_drafted"), " guesses ",
        shown("num_accepted"), " were right. ", shown("tokens_per_second"), " tokens a second, ",
        shown("plain_tokens_per_second"), " without guesses.",
    )  # fmt: skip
    emissions = [Emission(**item) for item in found["emissions"]]
    keys = ("num_drafted", "num_accepted", "num_tokens")
    rows = [
        [str(i + 1), *[number(f"speculation.emissions.{i}.{key}", found["emissions"][i][key]) for key in keys]]
        for i in range(len(emissions))
    ]
    listed = table(("emission", "drafted", "accepted", "emitted"), rows, numeric=(0, 1, 2, 3))
    return [told, speculation_html(emissions), element("details", element("summary", "each verify"), listed)]


def _costs(costs: dict[str, Any]) -> list[Markup]:
    if not costs:
        return [element("p", "Nothing was measured.")]
    rows = []
    for name in ("capture_into_slot", "exchange", "commit"):
        cost, path = costs[name], f"costs.{name}"
        us, ratio = number(f"{path}.microseconds", cost["microseconds"]), number(f"{path}.ratio", cost["ratio"])
        rows.append((name.replace("_", " "), us, ratio, cost["against"]))
    told = element("p", "Of a state of ", number("costs.state_bytes", costs["state_bytes"]), " bytes.")
    return [told, table(("operation", "microseconds", "ratio", "against"), rows, numeric=(1, 2))]

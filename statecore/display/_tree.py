"""A tree of branches: who came from whom, how many tokens each holds, and what it takes."""

import dataclasses
from collections.abc import Iterator

from statecore.display._html import Markup, View, element, size, svg
from statecore.generation import RunNode, Tree

_WIDTH, _LINE, _INDENT, _BAR = 740, 34, 26, 190


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeNode:
    """One run, branch or snapshot, and what came from it.

    name: what it is called.
    tokens: tokens that its state holds.
    num_bytes: bytes that its state takes; None if unknown.
    is_running: whether its state is the installed one.
    children: what was taken or forked from it.
    note: what else to say, such as leases or exchanges.
    """

    name: str
    tokens: int
    num_bytes: int | None
    is_running: bool = False
    children: tuple["TreeNode", ...] = ()
    note: str = ""

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "TreeNode"]]:
        """Yields this node and all below it, with their depths, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def _repr_html_(self) -> str:
        return show_tree(self).html

    def __str__(self) -> str:
        return show_tree(self).text


def show_runs(tree: Tree) -> View:
    """Returns the runs of a generation to look at: who came from whom, and what each holds."""
    return show_tree(run_nodes(tree))


def run_nodes(tree: Tree) -> TreeNode:
    """Returns the runs of a generation as nodes to draw."""
    leased = f"{tree.num_exchanges} exchanges, {size(tree.usage.retained_bytes)} leased"

    def node(run: RunNode, note: str = "") -> TreeNode:
        status = "dropped" if run.status is None else run.status.value
        saved = f"snapshots at {', '.join(map(str, run.snapshots))}" if run.snapshots else ""
        return TreeNode(
            name=f"run {run.name}",
            tokens=run.num_tokens,
            num_bytes=run.num_bytes,
            is_running=run.is_running,
            children=tuple(node(child) for child in run.children),
            note="; ".join(part for part in (status, saved, note) if part),
        )

    return node(tree.root, leased)


def show_tree(root: TreeNode) -> View:
    """Returns a tree to look at; the bars are to scale by bytes."""
    return View(text="\n".join(_lines(root)), html=tree_html(root))


def tree_html(root: TreeNode) -> Markup:
    """Returns the picture of a tree."""
    nodes = list(root.walk())
    largest = max((node.num_bytes or 0 for _, node in nodes), default=0)
    # A deep chain is pushed to the right less, so that it stays inside.
    indent = min(_INDENT, 240 / max(1, max(depth for depth, _ in nodes)))
    parents: list[int] = []
    drawn = []
    for row, (depth, node) in enumerate(nodes):
        drawn.append(_node(node, depth * indent, row * _LINE, largest))
        del parents[depth:]
        if parents:
            drawn.append(_branch((depth - 1) * indent, parents[-1] * _LINE, depth * indent, row * _LINE))
        parents.append(row)
    return svg(_WIDTH, _LINE * len(nodes) + 4, "the tree of branches by bytes", *drawn)


def _node(node: TreeNode, left: float, top: float, largest: int) -> Markup:
    color = "#2a9d8f" if node.is_running else "#3b82c4"
    width = _BAR * (node.num_bytes or 0) / largest if largest else 0.0
    said = f"{node.name}: {node.tokens} tokens, {_bytes(node)}" + (", running" if node.is_running else "")
    facts = f"{node.tokens:,} tokens, {_bytes(node)}{', running' if node.is_running else ''}"
    return element(
        "g",
        element("title", f"{said}. {node.note}".strip()),
        element(
            "circle",
            cx=left + 8,
            cy=top + 14,
            r=6,
            fill=color if node.is_running else "none",
            stroke=color,
            stroke_width=2,
        ),
        element("text", _short(node.name, 40), x=left + 22, y=top + 12, font_size=13, font_weight="bold"),
        element("text", _short(node.note, 52), x=left + 22, y=top + 26, font_size=11, fill_opacity=0.75),
        element(
            "rect", x=_WIDTH - 2 * _BAR - 10, y=top + 5, width=max(width, 1.0), height=16, fill=color, fill_opacity=0.6
        ),
        element("text", facts, x=_WIDTH - _BAR - 2, y=top + 18, font_size=12),
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"  # whole in the title


def _branch(from_x: float, from_y: float, to_x: float, to_y: float) -> Markup:
    path = f"M {from_x + 8:.1f} {from_y + 20:.1f} V {to_y + 14:.1f} H {to_x + 2:.1f}"
    return element("path", d=path, fill="none", stroke="currentColor", stroke_opacity=0.5)


def _lines(root: TreeNode) -> list[str]:
    return [
        f"{'  ' * depth}{'*' if node.is_running else '-'} {node.name}: {node.tokens} tokens, {_bytes(node)}"
        + (f" ({node.note})" if node.note else "")
        for depth, node in root.walk()
    ]


def _bytes(node: TreeNode) -> str:
    return "unknown bytes" if node.num_bytes is None else size(node.num_bytes)

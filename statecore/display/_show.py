"""Geometries, states, sequences and slots to look at, in a terminal or a notebook."""

import jax
import numpy as np

from statecore._pytree import check_alive
from statecore._typing import PyTree
from statecore.backend import Backend, Model
from statecore.display._anatomy import anatomy
from statecore.display._html import Markup, View, element, joined, size, table
from statecore.display._table import geometry_rows
from statecore.runtime import Slot
from statecore.ssm import SequenceState
from statecore.state import DIFF_HEADER, Geometry, StateDiff, diff_cells, is_marked, state_geometry

Facts = list[tuple[str, str]]


def show(state: PyTree, backend: Backend) -> View:
    """Returns a state to look at: its planes to scale by bytes, what of them is used, and a table.

    Args:
      state: of `B` sequences.
      backend: whose planes it has.

    Raises:
      GeometryError: the state does not mirror the backend's planes.
      StateConsumedError: it was donated.
    """
    return _view("state", *_anatomy_of(state, backend), _state_facts(state, backend))


def show_geometry(geometry: Geometry) -> View:
    """Returns a geometry to look at: its planes to scale by bytes, and a table."""
    return _view("geometry", geometry, None, [])


def show_sequence(seq: SequenceState) -> View:
    """Returns a sequence to look at: its state, and what a decoder keeps around it.

    Raises:
      StateConsumedError: its state was donated.
    """
    geometry, lengths = _anatomy_of(seq.state, seq.backend)
    saved = ", ".join(f"slot {entry.slot} at {entry.position}" for entry in seq.ring.entries) or "nothing"
    window = "none" if seq.opened is None else f"{seq.opened.tokens.shape[1]} rows, unresolved"
    facts = [
        ("tokens", _listed(lengths)),
        ("strategy", seq.strategy),
        ("checkpoint", "none" if seq.checkpoint is None else f"at {_listed(seq.checkpoint.lengths.tolist())}"),
        ("ring", f"{seq.ring.num_slots} slots; saved: {saved}"),
        ("open window", window),
        ("patched", ", ".join(seq.backend.layout.paths[i] for i in sorted(seq.patched)) or "no"),
    ]
    return _view("sequence", geometry, lengths, facts)


def show_slot(slot: Slot, model: Model) -> View:
    """Returns a slot to look at: the state that it holds, and whether it can be used with `model`.

    Raises:
      StateConsumedError: the slot was exchanged or copied into.
    """
    slot.check_usable()
    own = slot.identity.load is model.identity.load
    facts = [*_state_facts(slot.state, model.backend), ("of this load", "yes" if own else "no: it would be refused")]
    return _view("slot", *_anatomy_of(slot.state, model.backend), facts)


def show_saved(slot: Slot, geometry: Geometry) -> View:
    """Returns a slot to look at where only its geometry is known: what is used of each plane."""
    facts = [("tokens", _listed(slot.lengths.tolist()))]
    if slot.num_rows is not None:
        facts.append(("compact", f"attention rows are cut to {slot.num_rows}"))
    if slot.is_patched:
        facts.append(("patched", "yes: no tokens made it, so no prefix cache holds it"))
    return _view("slot", geometry, slot.lengths.tolist(), facts)


def show_diff(found: StateDiff) -> View:
    """Returns a diff as a table, a row a plane or layer that differs."""
    if not found:
        return View(text=str(found), html=element("p", str(found)))
    html = table(DIFF_HEADER, [diff_cells(part) for part in found], numeric=(2, 3, 4))
    return View(text=str(found), html=html)


def geometry_html(geometry: Geometry) -> Markup:
    """Returns the table of planes: kind, shape, dtype, bytes, layers, and what undoes them."""
    rows = []
    for plane, row in zip(geometry.planes, geometry_rows(geometry), strict=True):
        nbytes = "unknown" if row["bytes"] is None else f"{row['bytes']:,}"
        layers = "" if plane.plane.layers is None else ", ".join(map(str, plane.plane.layers))
        shape = "×".join(map(str, row["shape"]))
        rows.append((row["path"], row["kind"], shape, row["dtype"], nbytes, layers, row["undone_by"]))
    header = ("plane", "kind", "shape", "dtype", "bytes", "layers", "undone by")
    return table(header, rows, numeric=(4,))


def _view(what: str, geometry: Geometry, lengths: list[int] | None, facts: Facts) -> View:
    sizes = [plane.nbytes for plane in geometry.planes]
    total = None if None in sizes else sum(filter(None, sizes))
    title = f"{what} of {geometry.name}: batch {geometry.batch}, capacity {geometry.capacity}, {size(total)}"
    lines = [title, *(f"  {name}: {value}" for name, value in facts), str(geometry).partition("\n")[2]]
    html = element(
        "div",
        element("p", element("b", title)),
        anatomy(geometry, lengths),
        element("p", *joined_facts(facts)) if facts else "",
        element("details", element("summary", "planes"), geometry_html(geometry)),
    )
    return View(text="\n".join(lines), html=html)


def joined_facts(facts: Facts) -> list[Markup]:
    """Returns facts as lines."""
    return [joined([element("b", name), f" {value}", element("br")]) for name, value in facts]


def _anatomy_of(state: PyTree, backend: Backend) -> tuple[Geometry, list[int]]:
    check_alive(backend.layout.named(state))
    lengths = np.array(backend.layout.lengths(state))
    return state_geometry(backend.layout, state, backend.name), np.where(lengths < 0, ~lengths, lengths).tolist()


def _state_facts(state: PyTree, backend: Backend) -> Facts:
    lengths = np.array(backend.layout.lengths(state))
    facts = [("tokens", _listed(np.where(lengths < 0, ~lengths, lengths).tolist()))]
    if (lengths < 0).any():
        facts.append(("refused", "a transition inside a trace was refused; see `clear_refusal`"))
    if is_marked(state):
        facts.append(("patched", "yes: no tokens made it, so no prefix cache holds it"))
    devices = {str(device) for leaf in jax.tree.leaves(state) for device in leaf.devices()}
    return [*facts, ("device", ", ".join(sorted(devices)))]


def _listed(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths))

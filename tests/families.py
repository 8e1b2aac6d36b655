"""The committed fixtures of model families: tiny models of the reference, its logits and its states."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import statecore as sc
from statecore.models.families import FAMILIES
from statecore.models.files import open_folder

FOLDER = Path(__file__).parent / "fixtures"
CAPACITY = 48

# Our planes of rows, and what the reference calls them.
_ROWS = {"key": "key", "value": "value", "latent": "key", "rope_key": "value"}

# The delta rule sums in another order than its reference does.
TOLERANCES = {"qwen3_next": 1e-4, "qwen3_5_text": 1e-4}


@dataclasses.dataclass(frozen=True)
class Fixture:
    """One fixture: the model as statecore loads it, and what the reference made of it.

    ids: `[2, T]`.
    logits: `[2, T, V]` of a full pass.
    prefix: tokens that the states were taken after.
    states: of the reference, by `layer.part`, in its own layout.
    """

    name: str
    model: sc.Model
    ids: np.ndarray
    logits: np.ndarray
    prefix: int
    states: dict[str, np.ndarray]

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.model.name, 1e-5)

    def empty(self, batch: int = 2, capacity: int = CAPACITY):
        return self.model.backend.init(self.model.params, batch=batch, capacity=capacity)

    def read(self, ids, **options):
        """Returns state and logits after `ids`, from an empty state."""
        return sc.extend(self.model.backend, self.model.params, self.empty(len(ids)), ids, **options)


def _by_name() -> dict[str, str]:
    """Returns the family of each fixture that statecore knows."""
    kinds = {path.parent.name: open_folder(path.parent).config for path in FOLDER.glob("*/expected.safetensors")}
    return {name: kind["model_type"] for name, kind in sorted(kinds.items()) if kind["model_type"] in FAMILIES}


_FAMILY = _by_name()
NAMES = list(_FAMILY)
# One fixture of each family.
ONE_OF_EACH = list({family: name for name, family in _FAMILY.items()}.values())


@functools.cache
def fixture(name: str) -> Fixture:
    """Returns a fixture, loaded once."""
    found = load_file(FOLDER / name / "expected.safetensors")
    states = {path.removeprefix("state."): leaf for path, leaf in found.items() if path.startswith("state.")}
    model = sc.load(FOLDER / name)
    return Fixture(name, model, found["ids"], found["logits"], int(found["prefix"]), states)


def layout_of(name: str):
    """Returns the planes of a fixture's model, whose weights are not loaded."""
    return sc.default_registry().lookup(open_folder(FOLDER / name).config).describe()[0].layout


def planes_like(layout, state, length: int, reference: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what a state holds after `length` tokens, in the layout and under the names of the reference."""
    found = {}
    for path, plane, leaf in zip(layout.paths, layout.planes, layout.leaves(state), strict=True):
        for index, layer in enumerate(plane.layers or ()):
            part = np.array(leaf[index])
            name, part = _as_reference(path, plane, part, length)
            wanted = reference[f"{layer}.{name}"]
            if name == "conv":
                # Only the last C - 1 of the reference's C columns are ever read.
                wanted = wanted[..., -part.shape[-1] :]
            found[f"{layer}.{name}"] = part, wanted
    return found


def _as_reference(path: str, plane, part: np.ndarray, length: int) -> tuple[str, np.ndarray]:
    if plane.kind == "shift":
        return "conv", part.swapaxes(1, 2)
    if plane.kind == "recurrent":
        return "recurrent", part
    name = _ROWS[path.removeprefix("ring_").removesuffix("_2")]
    if plane.kind == "sliding":
        rows = np.arange(max(0, length - plane.size + 1), length) % part.shape[1]
        return name, part[:, rows].swapaxes(1, 2)
    rows = part[:, :length]
    return name, rows[:, None] if rows.ndim == 3 else rows.swapaxes(1, 2)


HEADER = ("family", "state planes", "undone by", "tolerance", "reached")
DOCUMENT = FOLDER.parent.parent / "docs" / "models.md"
MARKS = "<!-- families: begin -->\n", "<!-- families: end -->"


def table_rows() -> list[tuple[str, ...]]:
    """Returns the rows of the table of families: what each keeps, and how near it comes to its reference."""
    families: dict[str, list[Fixture]] = {}
    for name in NAMES:
        families.setdefault(fixture(name).model.name, []).append(fixture(name))
    return [_row(name, found) for name, found in sorted(families.items())]


def _row(name: str, found: list[Fixture]) -> tuple[str, ...]:
    planes = {
        path: plane
        for one in found
        for path, plane in zip(one.model.backend.layout.paths, one.model.backend.layout.planes, strict=True)
        if plane.kind != "position"
    }
    kinds = {plane.kind: plane.undone_by for plane in planes.values()}
    reached = max(np.abs(np.array(one.read(one.ids)[1]) - one.logits).max() for one in found)
    return (
        f"`{name}`",
        ", ".join(f"`{path}` ({plane.kind})" for path, plane in planes.items()),
        "; ".join(dict.fromkeys(kinds.values())),
        f"{found[0].tolerance:.0e}",
        f"{reached:.1e}",
    )


def document_rows() -> list[tuple[str, ...]]:
    """Returns the rows that the document has."""
    text = DOCUMENT.read_text()
    lines = text[text.index(MARKS[0]) + len(MARKS[0]) : text.index(MARKS[1])].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def write_document() -> None:
    """Writes the table into the document."""
    lines = [HEADER, ("---",) * len(HEADER), *table_rows()]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    text = DOCUMENT.read_text()
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    DOCUMENT.write_text(text[:start] + table + text[end:])


if __name__ == "__main__":
    write_document()

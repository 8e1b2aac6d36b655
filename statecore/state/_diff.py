"""Where two states differ: a record a plane and layer, over what can be read. Host only."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import UnsupportedError
from statecore._pytree import check_alive, is_traced
from statecore._typing import PyTree
from statecore.state import _equality as equality
from statecore.state._address import Part, parts
from statecore.state._edit import HasLayout, check_same_geometry, layout_of
from statecore.state._layout import Layout, row_axis
from statecore.state._notebook import notebook_html
from statecore.state.planes import Plane


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartDiff:
    """How one plane, or one layer of a stacked one, differs.

    name: `layers.3.hidden`, or the plane's path.
    kind: of the plane.
    num_compared: elements that can be read in both states.
    num_differing: those of them whose bits differ.
    max_difference: the greatest absolute difference; NaN if one of the two is not a
      number, None where nothing differs or differences mean nothing (PRNG keys).
    sequence: the sequence `b` of the first differing element; None if all share the plane.
    token: the position of its token, in append and sliding planes.
    index: where it is in the first state's plane, axis by axis.
    values: it in the first and in the second state, as text.
    """

    name: str
    kind: str
    num_compared: int
    num_differing: int = 0
    max_difference: float | None = None
    sequence: int | None = None
    token: int | None = None
    index: tuple[int, ...] | None = None
    values: tuple[str, str] | None = None

    @property
    def differs(self) -> bool:
        """Whether any bit differs."""
        return self.num_differing > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateDiff:
    """Where two states differ. Empty, and false as a condition, exactly if `sc.equal` holds.

    parts: all planes and layers, those that do not differ included.
    lengths: tokens that each sequence holds, in the first and in the second state. Where
      they differ, only tokens that both can read are compared.
    """

    parts: tuple[PartDiff, ...]
    lengths: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def differing(self) -> tuple[PartDiff, ...]:
        """The parts that differ."""
        return tuple(part for part in self.parts if part.differs)

    def __bool__(self) -> bool:
        return bool(self.differing)

    def __iter__(self) -> Iterator[PartDiff]:
        return iter(self.differing)

    def __len__(self) -> int:
        return len(self.differing)

    def _repr_html_(self) -> str:
        return notebook_html("show_diff", self)

    def __str__(self) -> str:
        if not self:
            return f"No bit differs in {sum(part.num_compared for part in self.parts):,} elements."
        rows = [DIFF_HEADER, *(diff_cells(part) for part in self.differing)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


DIFF_HEADER = ("part", "kind", "differ", "of", "max difference", "first at", "there")


def diff_cells(part: PartDiff) -> tuple[str, ...]:
    """Returns a part as the texts of a table under `DIFF_HEADER`."""
    most = "" if part.max_difference is None else f"{part.max_difference:.6g}"
    where = "" if part.index is None else str(list(part.index))
    if part.token is not None:
        where = f"token {part.token}, {where}"
    if part.sequence is not None:
        where = f"sequence {part.sequence}, {where}"
    there = " / ".join(part.values or ())
    return part.name, part.kind, f"{part.num_differing:,}", f"{part.num_compared:,}", most, where, there


def diff(a: PyTree, b: PyTree, *, planes: HasLayout | PyTree) -> StateDiff:
    """Returns where two states differ in their bits, over what can be read. Changes neither.

    Rows past the position do not count, nor do a ring's rows older than its window;
    capacities may differ. Of sequences of different lengths, the tokens that both can read
    are compared, and the position differs. Copies one plane after the other to the host.

    Args:
      a: of `B` sequences.
      b: likewise.
      planes: what the planes are: a backend, a geometry, or the tree of planes.

    Raises:
      GeometryError: the states have other structures, batches or dtypes, by path.
      StateConsumedError: one of them was donated.
      UnsupportedError: called inside a trace.
    """
    layout = layout_of(planes)
    if is_traced(a, b):
        raise UnsupportedError("A diff is read on the host. Inside a trace, `sc.equal` gives a bool array.")
    for name, state in (("first state", a), ("second state", b)):
        check_alive(layout.named(state), name)
    check_same_geometry(layout, a, b, ignore_rows=True)
    pair = _Pair.of(layout, layout.leaves(a), layout.leaves(b))
    found = tuple(diffed for i in range(len(layout.planes)) for diffed in _plane_diff(layout, pair, i))
    return StateDiff(parts=found, lengths=(tuple(pair.lengths[0].tolist()), tuple(pair.lengths[1].tolist())))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The leaves of two states, their true lengths, and what can be read of both."""

    leaves: tuple[list[jax.Array], list[jax.Array]]
    lengths: tuple[np.ndarray, np.ndarray]
    readable: tuple[list[jax.Array], list[jax.Array]]

    @classmethod
    def of(cls, layout: Layout, a: list[jax.Array], b: list[jax.Array]) -> "_Pair":
        lengths = tuple(_true(np.array(leaves[layout.position])) for leaves in (a, b))
        common = jnp.asarray(np.minimum(*lengths))
        capacities = [size for size in (layout.capacity(a), layout.capacity(b)) if size is not None]
        level = [[common if i == layout.position else leaf for i, leaf in enumerate(leaves)] for leaves in (a, b)]
        left, right = (equality.readable(layout, leaves, min(capacities, default=None)) for leaves in level)
        left[layout.position], right[layout.position] = a[layout.position], b[layout.position]
        return cls((a, b), (lengths[0], lengths[1]), (left, right))


def _true(lengths: np.ndarray) -> np.ndarray:
    return np.where(lengths < 0, ~lengths, lengths)  # a refused state keeps its length as ~p


def _plane_diff(layout: Layout, pair: _Pair, i: int) -> list[PartDiff]:
    plane, leaf = layout.planes[i], pair.leaves[0][i]
    left, right = (readable[i] for readable in pair.readable)
    valid = np.broadcast_to(_valid(plane, left, pair), left.shape)
    wrong = _wrong_bits(left, right) & valid
    arrays = [wrong, valid, _host(left), _host(right)]
    if plane.kind == "sliding":
        arrays = [np.flip(array, row_axis(plane, leaf)) for array in arrays]  # oldest token first
    named = [dataclasses.replace(part, leaf=i) for part in parts([layout.paths[i]], [plane])]
    return [_part_diff(part, plane, leaf, pair, *[part.read(array) for array in arrays]) for part in named]


def _valid(plane: Plane, readable: jax.Array, pair: _Pair) -> np.ndarray:
    """Returns which elements both states can read, shaped to broadcast against what is readable."""
    if plane.kind not in ("append", "sliding"):
        return np.ones((1,) * readable.ndim, bool)
    axis, batch_axis = row_axis(plane, readable), (plane.batch_axis or 0) % readable.ndim
    short, long = np.minimum(*pair.lengths), np.maximum(*pair.lengths)
    if plane.kind == "append":
        valid = np.arange(readable.shape[axis]) < short[:, None]
    else:
        # Newest first from the shorter state's end; the longer one reads its own window only.
        most = np.minimum(short, (plane.size or 1) - 1 - (long - short))
        valid = np.arange(1, plane.size or 1) <= most[:, None]
    shape = [1] * readable.ndim
    shape[batch_axis], shape[axis] = valid.shape
    return (valid if batch_axis < axis else valid.T).reshape(shape)


def _wrong_bits(left: jax.Array, right: jax.Array) -> np.ndarray:
    wrong = np.array(equality.bits(left) != equality.bits(right))
    if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
        return np.any(wrong, axis=tuple(range(left.ndim, wrong.ndim))).reshape(left.shape)
    return np.any(wrong, axis=0).reshape(left.shape) if jnp.issubdtype(left.dtype, jnp.complexfloating) else wrong


def _host(array: jax.Array) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.array(array)
    words = np.array(jax.random.key_data(array))
    keys = np.empty(array.shape, object)
    for index in np.ndindex(array.shape):
        keys[index] = words[index].tolist()
    return keys


def _part_diff(part: Part, plane: Plane, leaf: jax.Array, pair: _Pair, wrong, valid, left, right) -> PartDiff:
    number = int(wrong.sum())
    common = {"name": part.name, "kind": plane.kind, "num_compared": int(valid.sum()), "num_differing": number}
    if not number:
        return PartDiff(**common)
    inner = tuple(int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape))
    sequence = None if plane.batch_axis is None else inner[part.axis(plane.batch_axis, leaf.ndim)]
    token, index = _place(part, plane, leaf, pair, inner, sequence)
    return PartDiff(
        **common,
        max_difference=_max_difference(left[wrong], right[wrong]),
        sequence=sequence,
        token=token,
        index=index,
        values=(str(left[inner]), str(right[inner])),
    )


def _place(
    part: Part, plane: Plane, leaf: jax.Array, pair: _Pair, inner: tuple[int, ...], sequence: int | None
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the token at `inner` of what was compared, and its index in the first state's plane."""
    if plane.kind not in ("append", "sliding") or sequence is None:
        return None, part.index(inner, leaf.ndim)
    axis = part.axis(row_axis(plane, leaf), leaf.ndim)
    token = row = inner[axis]
    if plane.kind == "sliding":
        # Flipped, the last of the `W - 1` rows is the newest token.
        token = int(np.minimum(*pair.lengths)[sequence]) - (plane.size or 1) + 1 + inner[axis]
        row = token % leaf.shape[row_axis(plane, leaf)]
    return token, part.index((*inner[:axis], row, *inner[axis + 1 :]), leaf.ndim)


def _max_difference(left: np.ndarray, right: np.ndarray) -> float | None:
    if left.dtype == object:
        return None  # the distance of two keys means nothing
    wide: Any = np.complex128 if np.iscomplexobj(left) else np.float64
    if left.dtype.kind in "iu":
        return float(max(abs(int(x) - int(y)) for x, y in zip(left, right, strict=True)))
    with np.errstate(invalid="ignore"):
        most = np.abs(left.astype(wide) - right.astype(wide)).max()
    return math.nan if np.isnan(most) else float(most)

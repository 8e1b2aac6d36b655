"""Names of planes and of one layer's part of a stacked plane.

`hidden` is a whole plane, `hidden[2]` its third place in the stack, and
`layers.3.hidden` the part of layer 3, wherever that stands.
"""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from statecore._errors import GeometryError
from statecore._pytree import path_name
from statecore._typing import PyTree
from statecore.state.planes import Plane

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_PLACE = re.compile(r"(.+)\[(\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A plane, or one layer's part of it.

    name: as it is best said: `layers.3.hidden`, or the plane's path.
    path: of the plane.
    leaf: which leaf of the state the plane is.
    plane: how it changes; None if nobody said.
    place: where in the stack the part is; None for the whole plane.
    layer: the number of the layer; None for the whole plane.
    """

    name: str
    path: str
    leaf: int
    plane: Plane | None
    place: int | None = None
    layer: int | None = None

    def read(self, array: Any) -> Any:
        """Returns the part of the plane `array`; without the layer's axis if it is one layer's."""
        return array if self.place is None else array[self._index(array)]

    def write(self, array: jax.Array, value: jax.Array) -> jax.Array:
        """Returns the plane `array` with `value`, shaped as `read` gives it, in this part."""
        return value if self.place is None else array.at[self._index(array)].set(value)

    def index(self, inner: tuple[int, ...], num_axes: int) -> tuple[int, ...]:
        """Returns the index in the plane of the element at `inner` of the part."""
        if self.place is None:
            return inner
        axis = self._axis(num_axes)
        return (*inner[:axis], self.place, *inner[axis:])

    def axis(self, axis: int, num_axes: int) -> int:
        """Returns which axis of the part is axis `axis` of the plane, which is not the layers'."""
        axis %= num_axes
        return axis - (self.place is not None and axis > self._axis(num_axes))

    def _axis(self, num_axes: int) -> int:
        assert self.plane is not None and self.plane.layer_axis is not None  # else there is no place
        return self.plane.layer_axis % num_axes

    def _index(self, array: Any) -> tuple:
        return (slice(None),) * self._axis(array.ndim) + (self.place,)


def layer_faults(plane: Plane, shape: tuple[int, ...]) -> list[str]:
    """Returns why the layers of a plane do not fit its shape, a sentence each; empty if they do."""
    if plane.layer_axis is None and plane.layers is None:
        return []
    if plane.layer_axis is None or plane.layers is None:
        given, missing = ("layers", "layer_axis") if plane.layer_axis is None else ("layer_axis", "layers")
        return [f"says {given} but not {missing}; a stacked plane says both"]
    numbers, axis = plane.layers, plane.layer_axis % len(shape)
    faults = []
    if any(isinstance(number, bool) or not isinstance(number, Integral) or number < 0 for number in numbers):
        faults.append(f"has layers {list(numbers)}, but layers are whole numbers from 0")
    if len(set(numbers)) != len(numbers):
        faults.append(f"has layers {list(numbers)}, of which one is named twice")
    if len(numbers) != shape[axis]:
        faults.append(f"has shape {list(shape)}, so {shape[axis]} layers on axis {axis}, but names {len(numbers)}")
    others = [other % len(shape) for other in (plane.batch_axis, plane.axis) if other is not None]
    if axis in others:
        faults.append(f"has axis {axis} both for layers and for sequences or rows")
    return faults


def parts(paths: Sequence[str], planes: Sequence[Plane]) -> list[Part]:
    """Returns the smallest parts of a state: one a layer of each stacked plane, one for any other plane."""
    found: list[Part] = []
    for i, (path, plane) in enumerate(zip(paths, planes, strict=True)):
        if plane.layers is None:
            found.append(Part(name=path, path=path, leaf=i, plane=plane))
            continue
        found += [_part(path, i, plane, place) for place in range(len(plane.layers))]
    return found


def find_part(paths: Sequence[str], planes: Sequence[Plane] | None, name: str) -> Part:
    """Returns what `name` names.

    Args:
      paths: of the leaves of a state.
      planes: what they are; None if nobody said, and then only whole planes have names.
      name: `hidden`, `hidden[2]` or `layers.3.hidden`.

    Raises:
      GeometryError: nothing has this name, or two things have.
    """
    layers = [] if planes is None else [part for part in parts(paths, planes) if part.layer is not None]
    found = [
        Part(name=path, path=path, leaf=i, plane=None if planes is None else planes[i])
        for i, path in enumerate(paths)
        if path == name
    ]
    found += [part for part in layers if name in (part.name, f"{part.path}[{part.place}]")]
    if len(found) == 1:
        return found[0]
    if found:
        raise GeometryError(f"`{name}` names two parts of this state, a plane and a layer's; rename the plane.")
    raise GeometryError(_unknown(paths, planes, layers, name))


def _part(path: str, leaf: int, plane: Plane, place: int) -> Part:
    assert plane.layers is not None
    layer = plane.layers[place]
    return Part(name=f"layers.{layer}.{path}", path=path, leaf=leaf, plane=plane, place=place, layer=layer)


def _unknown(paths: Sequence[str], planes: Sequence[Plane] | None, layers: list[Part], name: str) -> str:
    """Says that nothing is called `name`, and what is called nearly so."""
    by_layer, by_place = _LAYER.fullmatch(name), _PLACE.fullmatch(name)
    path = by_layer[2] if by_layer else by_place[1] if by_place else name
    if planes is None and (by_layer or by_place) and path in paths:
        return f"`{name}` names one layer of `{path}`, but nobody said how it is stacked. Give `planes=` the backend."
    of_plane = [part for part in layers if part.path == path]
    if of_plane:
        near = [part.name for part in of_plane]
        cause = f"`{path}` is stacked over the layers {[part.layer for part in of_plane]}."
    else:
        known = [*paths, *[part.name for part in layers]]
        near = difflib.get_close_matches(name, known, n=6, cutoff=0.4) or list(paths)
        cause = f"`{path}` is not stacked over layers." if path in paths else "Was it misspelled?"
    return f"This state has no plane or part `{name}`. {cause} Near it: {', '.join(f'`{n}`' for n in near)}."


def leaf_paths(state: PyTree) -> tuple[list[str], list[Any], Any]:
    """Returns the paths and the leaves of any tree of arrays, and its structure."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    return [path_name(path) for path, _ in flat], [leaf for _, leaf in flat], treedef


def may_be_position(part: Part, leaf: Any) -> bool:
    """Returns whether the part is the position, or nobody said that it is not: int32 `[B]`."""
    if part.plane is not None:
        return part.plane.kind == "position"
    return leaf.dtype == jnp.int32 and leaf.ndim == 1

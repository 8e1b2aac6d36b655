"""The seven kinds of planes: how each changes, and what undoes it.

A user writes them down once, mirroring the state:

    from statecore import planes as pl
    planes = {"kv": pl.append(axis=1), "h": pl.recurrent(), "pos": pl.position()}

A plane that is stacked over layers may say so, `pl.recurrent(batch_axis=1, layer_axis=0,
layers=(0, 2, 3))`; then `layers.2.h` names one layer's part of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

__all__ = ["Plane", "append", "constant", "opaque", "position", "recurrent", "shift", "sliding"]

Kind = Literal["position", "append", "sliding", "shift", "recurrent", "constant", "opaque"]

_UNDONE_BY: dict[str, str] = {
    "position": "arithmetic",
    "append": "the position alone",
    "sliding": "the position, within the ring",
    "shift": "the kept last inputs",
    "recurrent": "a kept step, or a replay",
    "constant": "nothing to undo",
    "opaque": "nothing undoes it",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane:
    """How one array of a state changes. Made by the functions of this module.

    kind: one of the seven kinds.
    batch_axis: the axis of the sequences; None where all sequences share the array.
    axis: the axis of rows, for `append`, `sliding` and `shift`.
    size: the attention window `W` of a `sliding` plane: how many rows a token sees,
      its own included.
    layer_axis: the axis of the layers, where a plane is stacked over layers.
    layers: the number of the layer at each place of that axis.
    """

    kind: Kind
    batch_axis: int | None = 0
    axis: int | None = None
    size: int | None = None
    layer_axis: int | None = None
    layers: tuple[int, ...] | None = None

    @property
    def undone_by(self) -> str:
        """What takes the last tokens of this plane back, in a few words."""
        return _UNDONE_BY[self.kind]


def position() -> Plane:
    """The absolute length of each sequence, int32 `[B]`. A state has exactly one."""
    return Plane(kind="position")


def append(
    *, axis: int, batch_axis: int = 0, layer_axis: int | None = None, layers: Sequence[int] | None = None
) -> Plane:
    """Rows written once, at the position: keys and values, an MLA latent, a history.

    Args:
      axis: the axis of the rows; its extent is the capacity.
      batch_axis: the axis of the sequences.
      layer_axis: the axis of the layers, if it is stacked over layers.
      layers: the number of the layer at each place of `layer_axis`.
    """
    return Plane(kind="append", axis=axis, batch_axis=batch_axis, **_stacked(layer_axis, layers))


def sliding(
    *, axis: int, size: int, batch_axis: int = 0, layer_axis: int | None = None, layers: Sequence[int] | None = None
) -> Plane:
    """A ring of rows, written at `position % R`, of which a token sees the last `size`.

    Args:
      axis: the axis of the rows; its extent is `R`, at least `size`. A window may have
        `R - size + 1` tokens: more could not be undone.
      size: the attention window `W`, the token itself included.
      batch_axis: the axis of the sequences.
      layer_axis: the axis of the layers, if it is stacked over layers.
      layers: the number of the layer at each place of `layer_axis`.
    """
    return Plane(kind="sliding", axis=axis, size=size, batch_axis=batch_axis, **_stacked(layer_axis, layers))


def shift(
    *, axis: int, batch_axis: int = 0, layer_axis: int | None = None, layers: Sequence[int] | None = None
) -> Plane:
    """The last few inputs, oldest first: a causal convolution's, or a token shift.

    Args:
      axis: the axis of the inputs.
      batch_axis: the axis of the sequences.
      layer_axis: the axis of the layers, if it is stacked over layers.
      layers: the number of the layer at each place of `layer_axis`.
    """
    return Plane(kind="shift", axis=axis, batch_axis=batch_axis, **_stacked(layer_axis, layers))


def recurrent(*, batch_axis: int = 0, layer_axis: int | None = None, layers: Sequence[int] | None = None) -> Plane:
    """A state that each token overwrites: SSM, delta rule, RG-LRU. Layers are named as for `append`."""
    return Plane(kind="recurrent", batch_axis=batch_axis, **_stacked(layer_axis, layers))


def constant(
    *, batch_axis: int | None = 0, layer_axis: int | None = None, layers: Sequence[int] | None = None
) -> Plane:
    """Anything that tokens never change. `batch_axis=None` if all sequences share it."""
    return Plane(kind="constant", batch_axis=batch_axis, **_stacked(layer_axis, layers))


def opaque(*, batch_axis: int = 0, layer_axis: int | None = None, layers: Sequence[int] | None = None) -> Plane:
    """Anything else that tokens change. Nothing undoes it: any rollback is refused."""
    return Plane(kind="opaque", batch_axis=batch_axis, **_stacked(layer_axis, layers))


def _stacked(layer_axis: int | None, layers: Sequence[int] | None) -> dict:
    # A tuple, so that the plane hashes; whether it fits is seen where the shape is.
    return {"layer_axis": layer_axis, "layers": None if layers is None else tuple(layers)}

"""A language model as a value: layers of blocks, blocks of mixers.

A family is nothing but a function from its configuration to a `Decoder`; how a decoder
runs, and what it keeps, is said once, in `_passes` and `_planes`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from statecore.models.mixers import Mixer, Norm, Param, PlaneSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A residual block: `x + scale * norm_out(sum of mixers(norm_in(x)))`.

    mixers: by the names that their parameters have; more than one read the same input,
      and their outputs are added.
    norm_in, norm_out: by default none.
    scale: of what is added to the residual.
    """

    mixers: tuple[tuple[str, Mixer], ...]
    norm_in: Norm | None = None
    norm_out: Norm | None = None
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where the planes of one layer's mixer are: `names[plane]` of the state, at `index`."""

    names: tuple[tuple[str, str], ...]
    index: int

    @property
    def group(self) -> str:
        """The name under which what a verify keeps of this mixer is stacked."""
        return self.names[0][1]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """A decoder-only language model.

    layers: of each layer its blocks, named as their parameters are.
    norm: before the head.
    is_tied: whether the head is the embedding.
    embed_scale: of the embeddings; logit_scale: of the logits.
    logit_cap: what the logits are squashed to by a hyperbolic tangent, or None.
    is_residual_float32: whether the residual stream is float32 whatever the parameters are.
    """

    name: str
    vocab_size: int
    width: int
    layers: tuple[tuple[tuple[str, Block], ...], ...]
    norm: Norm
    is_tied: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    is_residual_float32: bool = False

    def mixers(self) -> Iterator[tuple[int, str, str, Mixer]]:
        """Yields layer number, block name, mixer name and mixer, in the order in which they run."""
        for number, blocks in enumerate(self.layers):
            for block_name, block in blocks:
                for name, mixer in block.mixers:
                    yield number, block_name, name, mixer

    def mixer(self, number: int, name: str) -> Any:
        """Returns the mixer `name` of a layer."""
        return next(mixer for layer, _, found, mixer in self.mixers() if (layer, found) == (number, name))

    @functools.cached_property
    def params(self) -> dict:
        """The parameters as a tree of `Param`."""
        tree: dict = {"embed": Param(shape=(self.vocab_size, self.width), init="embed")}
        tree["norm"] = _norm_param(self.norm, self.width)
        if not self.is_tied:
            tree["head"] = Param(shape=(self.width, self.vocab_size))
        tree["layers"] = {layer_name(i): _layer_params(blocks, self.width) for i, blocks in enumerate(self.layers)}
        return tree

    @functools.cached_property
    def planes(self) -> dict[str, tuple[PlaneSpec, tuple[int, ...]]]:
        """The planes of the state but the position: of each its form, and the layers it is stacked over."""
        found: dict[str, tuple[PlaneSpec, tuple[int, ...]]] = {}
        for number, _, _, mixer in self.mixers():
            for plane, spec in mixer.planes.items():
                name = _plane_name(found, plane, spec)
                found[name] = spec, (*found.get(name, (spec, ()))[1], number)
        return found

    @functools.cached_property
    def places(self) -> tuple[Place | None, ...]:
        """Where the planes of each mixer are, in the order of `mixers`; None for one that keeps nothing."""
        return tuple(self._place(number, mixer) for number, _, _, mixer in self.mixers())

    @functools.cached_property
    def groups(self) -> dict[str, tuple[Mixer, Place]]:
        """Of each group of equal planes that a commit advances, one mixer and where its planes are."""
        found: dict[str, tuple[Mixer, Place]] = {}
        for (_, _, _, mixer), place in zip(self.mixers(), self.places, strict=True):
            if place is not None and any(spec.kind in ("shift", "recurrent") for spec in mixer.planes.values()):
                found.setdefault(place.group, (mixer, place))
        return found

    def _place(self, number: int, mixer: Mixer) -> Place | None:
        names = tuple((plane, _plane_name(self.planes, plane, spec)) for plane, spec in mixer.planes.items())
        return Place(names=names, index=self.planes[names[0][1]][1].index(number)) if names else None


def layer_name(number: int) -> str:
    """Returns the name of a layer's parameters; not a bare number, which NNX takes for the place in a list."""
    return f"layer_{number}"


def _plane_name(found: dict, plane: str, spec: PlaneSpec) -> str:
    """Returns the name of the plane of this form: the mixer's own, numbered where two forms have one name."""
    name, count = plane, 1
    while name in found and found[name][0] != spec:
        count += 1
        name = f"{plane}_{count}"
    return name


def _norm_param(norm: Norm, width: int) -> Param:
    return Param(shape=(width,), init="zeros" if norm.offset else "ones")


def _layer_params(blocks: tuple[tuple[str, Block], ...], width: int) -> dict:
    tree: dict = {}
    for name, block in blocks:
        for norm_name, norm in (("norm_in", block.norm_in), ("norm_out", block.norm_out)):
            if norm is not None:
                tree[f"{name}_{norm_name}"] = _norm_param(norm, width)
        for mixer_name, mixer in block.mixers:
            tree[mixer_name] = dict(mixer.params)
    return tree


def struct(decoder: Decoder, dtype: jax.typing.DTypeLike) -> dict:
    """Returns the shapes of the parameters in a dtype, as a tree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype(dtype)), decoder.params)

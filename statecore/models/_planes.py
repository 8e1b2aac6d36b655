"""A decoder's state and backend: its planes, stacked over the layers of their kind."""

from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike

from statecore.backend import Backend
from statecore.models import _passes
from statecore.models._decoder import Decoder
from statecore.models.mixers import PlaneSpec
from statecore.state import Plane
from statecore.state import planes as pl


def init_state(decoder: Decoder, batch: int, capacity: int, dtype: DTypeLike = jnp.float32) -> dict:
    """Returns an empty state: every plane as its family starts it, `[L, B, ...]`, recurrent ones in float32."""
    state = {}
    for name, (spec, layers) in decoder.planes.items():
        rows = capacity if spec.kind == "append" else spec.rows
        shape = (len(layers), batch, *(() if rows is None else (rows,)), *spec.shape)
        state[name] = jnp.full(shape, spec.fill, jnp.float32 if spec.is_float32 else dtype)
    return state | {"position": jnp.zeros(batch, jnp.int32)}


def decoder_backend(decoder: Decoder, dtype: DTypeLike = jnp.float32) -> Backend:
    """Returns the backend of a decoder whose parameters are of `dtype`. Build it once."""
    planes = {name: _plane(spec, layers) for name, (spec, layers) in decoder.planes.items()}
    return Backend(
        name=decoder.name,
        init=lambda params, batch, capacity: init_state(decoder, batch, capacity, dtype),
        step=partial(_passes.step, decoder),
        extend=partial(_passes.extend, decoder),
        extend_last=partial(_passes.extend_last, decoder),
        verify=partial(_passes.verify, decoder),
        replay=partial(_passes.replay, decoder),
        planes=planes | {"position": pl.position()},
    )


def _plane(spec: PlaneSpec, layers: tuple[int, ...]) -> Plane:
    if spec.kind == "recurrent":
        return pl.recurrent(batch_axis=1, layer_axis=0, layers=layers)
    if spec.kind == "shift":
        return pl.shift(axis=2, batch_axis=1, layer_axis=0, layers=layers)
    if spec.kind == "append":
        return pl.append(axis=2, batch_axis=1, layer_axis=0, layers=layers)
    assert spec.window is not None  # a sliding plane has one
    return pl.sliding(axis=2, batch_axis=1, size=spec.window, layer_axis=0, layers=layers)

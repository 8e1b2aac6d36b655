"""Any decoder as a Flax NNX module: to initialise it and to train it."""

import jax
import jax.numpy as jnp
from flax import nnx

from statecore.models import _passes
from statecore.models._decoder import Decoder
from statecore.models._planes import init_state
from statecore.models.mixers import Param, initial


class LanguageModel(nnx.Module):
    """A decoder with parameters of its own; calling it is the training pass.

    Serving takes `plain_params` of it: small jitted steps pay for each object in their signature.
    """

    def __init__(self, decoder: Decoder, *, rngs: nnx.Rngs):
        self.decoder = decoder
        for name, part in decoder.params.items():
            setattr(self, name, _variables(part, rngs, len(decoder.layers)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits `[B, T, V]` of `tokens` `[B, T]`, from an empty state."""
        return forward(self.decoder, plain_params(self), tokens)


def _variables(part: Param | dict, rngs: nnx.Rngs, depth: int) -> nnx.Variable | nnx.Dict:
    if isinstance(part, Param):
        return nnx.Param(initial(part, rngs.params(), depth=depth))
    return nnx.Dict({name: _variables(inner, rngs, depth) for name, inner in part.items()})


def plain_params(model: nnx.Module) -> dict:
    """Returns the parameters as a plain dict of arrays, which is what serving takes."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def forward(decoder: Decoder, params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the logits `[B, T, V]` of whole texts `[B, T]`: the training pass."""
    batch, length = tokens.shape
    num_valid = jnp.full(batch, length, jnp.int32)
    state = init_state(decoder, batch, length, params["embed"].dtype)
    return _passes.extend(decoder, params, state, tokens, num_valid)[1]

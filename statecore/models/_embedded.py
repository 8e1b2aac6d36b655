"""The embedded model as a backend, and its weights, which come with the package."""

from functools import partial
from pathlib import Path

import jax
from flax import nnx

from statecore.backend import Backend, Model
from statecore.models import _tiny_hybrid
from statecore.models._tiny_hybrid import TinyHybrid, TinyHybridConfig, plain_params
from statecore.models._tokenizer import ByteTokenizer
from statecore.models._weights import load_weights
from statecore.state import planes as pl

_WEIGHTS = Path(__file__).parent / "weights" / "tiny_hybrid.safetensors"


def tiny_hybrid_backend(config: TinyHybridConfig) -> Backend:
    """Returns the model's functions over its seven planes, stacked over layers."""
    rows = pl.append(axis=2, batch_axis=1)
    ring = pl.sliding(axis=2, batch_axis=1, size=config.window)
    return Backend(
        name="tiny-hybrid",
        init=lambda params, batch, capacity: _tiny_hybrid.init_state(config, batch, capacity),
        step=partial(_tiny_hybrid.step, config),
        extend=partial(_tiny_hybrid.extend, config),
        verify=partial(_tiny_hybrid.verify, config),
        replay=_tiny_hybrid.replay,
        planes={
            "conv": pl.shift(axis=2, batch_axis=1),
            "hidden": pl.recurrent(batch_axis=1),
            "key": rows,
            "value": rows,
            "ring_key": ring,
            "ring_value": ring,
            "position": pl.position(),
        },
    )


def load_tiny_hybrid() -> Model:
    """Returns the embedded model with its trained weights, in float32.

    Raises:
      LoadError: the file of weights does not fit.
    """
    config = TinyHybridConfig()
    struct = jax.eval_shape(lambda: plain_params(TinyHybrid(config, rngs=nnx.Rngs(0))))
    return Model(
        name="tiny-hybrid",
        backend=tiny_hybrid_backend(config),
        params=load_weights(_WEIGHTS, struct),
        tokenizer=ByteTokenizer(),
    )

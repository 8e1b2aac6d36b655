"""How a parameter starts before training, by the name that its mixer gives."""

import jax
import jax.numpy as jnp

from statecore.models.mixers._mixer import Param


def initial(param: Param, key: jax.Array, *, depth: int = 1) -> jax.Array:
    """Returns a parameter as training begins with it, in float32.

    `fan_in` draws normal with variance one over the rows, `residual` the same over the
    `depth` in layers too, and `embed` with a deviation of 0.5; `step_size` gives biases whose
    softplus lies between 0.001 and 0.1, and `log_range` logs of 1 to 16, both as Mamba-2
    has them (arXiv 2405.21060).
    """
    shape = param.shape
    if param.init == "zeros":
        return jnp.zeros(shape)
    if param.init == "ones":
        return jnp.ones(shape)
    if param.init == "log_range":
        return jnp.log(jnp.linspace(1.0, 16.0, shape[0]))
    if param.init == "step_size":
        low, high = jnp.log(0.001), jnp.log(0.1)
        size = jnp.exp(jax.random.uniform(key, shape) * (high - low) + low)
        return size + jnp.log(-jnp.expm1(-size))
    if param.init == "embed":
        return jax.random.normal(key, shape) * 0.5
    draw = jax.random.normal(key, shape) * shape[-2] ** -0.5
    return draw * depth**-0.5 if param.init == "residual" else draw

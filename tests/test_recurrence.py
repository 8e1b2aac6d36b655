"""The scalar-decay recurrence: its parallel forms are its steps, whatever the decays."""

import jax.numpy as jnp
import numpy as np
import pytest

from statecore.models.mixers import _recurrence

HEADS, SIZE, STATE = 3, 4, 5


def inputs(length, seed=0):
    """Returns a state and the inputs of some tokens; each head forgets now and then, and almost nothing otherwise."""
    draw = np.random.default_rng(seed)
    weak = -draw.uniform(1e-4, 1e-2, (2, length, HEADS))
    log_decay = np.where(draw.uniform(size=weak.shape) < 0.2, -draw.uniform(20, 400, weak.shape), weak)
    hidden = draw.normal(size=(2, HEADS, SIZE, STATE))
    x = draw.normal(size=(2, length, HEADS, SIZE))
    b, c = draw.normal(size=(2, 2, length, HEADS, STATE))
    return [np.asarray(leaf, np.float32) for leaf in (hidden, log_decay, x, b, c)]


def steps(hidden, log_decay, x, b, c):
    """Returns the state and the outputs by single steps, in float64."""
    hidden, log_decay, x, b, c = (np.asarray(leaf, np.float64) for leaf in (hidden, log_decay, x, b, c))
    outputs = []
    for t in range(x.shape[1]):
        hidden = hidden * np.exp(log_decay[:, t])[..., None, None] + x[:, t, ..., None] * b[:, t, :, None]
        outputs.append(np.einsum("bhpn,bhn->bhp", hidden, c[:, t]))
    return hidden, np.stack(outputs, axis=1)


@pytest.mark.parametrize(("length", "chunk"), [(1, 8), (7, 8), (8, 8), (9, 8), (40, 16), (64, 64)])
def test_chunks_are_steps_at_strong_and_weak_decays(length, chunk):
    """A strong decay before a stretch takes no digit of a weak one inside it."""
    given = inputs(length)
    hidden, outputs = _recurrence.ssd(*map(jnp.asarray, given), chunk=chunk)
    wanted_hidden, wanted = steps(*given)
    np.testing.assert_allclose(np.array(hidden), wanted_hidden, rtol=0, atol=3e-6 * np.abs(wanted_hidden).max())
    np.testing.assert_allclose(np.array(outputs), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("width", [1, 5, 8])
def test_a_window_reads_what_steps_read(width):
    given = inputs(width, seed=1)
    outputs = _recurrence.window_outputs(*map(jnp.asarray, given))
    _, wanted = steps(*given)
    np.testing.assert_allclose(np.array(outputs), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())

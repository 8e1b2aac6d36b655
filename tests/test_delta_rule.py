"""The gated delta rule: its forms against the recurrence in float64, padding that holds NaN, replays in bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from statecore.models.mixers import Chunk, GatedDelta, initial
from statecore.models.mixers._delta_rule import Tokens, chunked, counted, step, window
from statecore.models.mixers._recurrence import Drive, advance, replay

BATCH, HEADS, KEYS, VALUES, CHUNK = 2, 3, 6, 5, 8
DECAYS = {"weak": (-1e-3, -1e-3), "strong": (-40.0, -2.0), "mixed": (-90.0, -1e-4)}
BETAS = {"nothing": 1e-7, "half": 0.5, "all": 1.0}

fast_chunked = jax.jit(chunked, static_argnames="chunk")
fast_window = jax.jit(window)
fast_step = jax.jit(step)
fast_replay = jax.jit(replay)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def drawn(length, decay="mixed", beta="half", seed=0):
    """Returns a state, and tokens of which every other has the one decay and the other."""
    rng = np.random.default_rng(seed)
    heads = BATCH, length, HEADS
    log_decay = np.where(np.arange(length)[:, None] % 5 == 0, *DECAYS[decay]) * rng.uniform(0.5, 1, heads)
    tokens = Tokens(
        query=rng.normal(size=(*heads, KEYS)),
        key=unit(rng.normal(size=(*heads, KEYS))),
        value=rng.normal(size=(*heads, VALUES)),
        log_decay=log_decay,
        beta=np.minimum(BETAS[beta] * rng.uniform(0.9, 1.1, heads), 1.0),
    )
    hidden = rng.normal(size=(BATCH, HEADS, KEYS, VALUES))
    return jnp.float32(hidden), Tokens(*map(jnp.float32, tokens))


def plain(hidden, tokens, counts=None):
    """Returns state and outputs as the formula reads, in float64."""
    hidden = np.array(hidden, np.float64)
    query, key, value, log_decay, beta = (np.array(leaf, np.float64) for leaf in tokens)
    outputs = np.zeros(value.shape)
    for b in range(BATCH):
        for t in range(value.shape[1] if counts is None else counts[b]):
            for h in range(HEADS):
                faded = np.exp(log_decay[b, t, h]) * hidden[b, h]
                update = beta[b, t, h] * (value[b, t, h] - faded.T @ key[b, t, h])
                hidden[b, h] = faded + np.outer(key[b, t, h], update)
                outputs[b, t, h] = hidden[b, h].T @ query[b, t, h]
    return hidden, outputs


def by_steps(hidden, tokens):
    keep, outputs = jnp.ones(BATCH, bool), []
    for t in range(tokens.beta.shape[1]):
        hidden, out = fast_step(hidden, Tokens(*(leaf[:, t] for leaf in tokens)), keep)
        outputs.append(out)
    return hidden, np.stack(outputs, axis=1) if outputs else np.zeros((BATCH, 0, HEADS, VALUES))


def only(valid, leaf, filler):
    """Returns a leaf `[B, T, ...]` with `filler` in the rows that are not `valid` `[B, T]`."""
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (leaf.ndim - 2)), leaf, filler)


def close(found, wanted, tolerance=1e-5):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=tolerance)


regimes = pytest.mark.parametrize(("decay", "beta"), [(decay, beta) for decay in DECAYS for beta in BETAS])


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3])
def test_chunks_are_steps(length):
    """Of every decay and beta: both are the formula's."""
    for decay in DECAYS:
        for beta in BETAS:
            hidden, tokens = drawn(length, decay, beta)
            wanted = plain(hidden, tokens)
            close(by_steps(hidden, tokens), wanted)
            close(fast_chunked(hidden, tokens, chunk=CHUNK), wanted)


@regimes
def test_a_window_reads_what_steps_read(decay, beta):
    """And the updates that it keeps replay the state."""
    hidden, tokens = drawn(5, decay, beta, seed=1)
    update, outputs = fast_window(hidden, tokens)
    state, wanted = plain(hidden, tokens)
    close([outputs], [wanted])
    drive = Drive(tokens.log_decay[None], tokens.key[None], update[None])
    close([fast_replay(hidden[None], drive, jnp.full(BATCH, 5))[0]], [state])


def test_one_key_again_and_again():
    """What no key tells apart is the hardest system: each token takes back all that the last one wrote."""
    hidden, tokens = drawn(2 * CHUNK, "weak", "all")
    tokens = tokens._replace(key=jnp.broadcast_to(tokens.key[:, :1], tokens.key.shape))
    close(fast_chunked(hidden, tokens, chunk=CHUNK), plain(hidden, tokens))
    close(fast_window(hidden, tokens)[1:], plain(hidden, tokens)[1:])


def test_long_chunks_of_strong_and_weak_decay():
    """A decay's exponent is not a difference of large sums: those would be off by a thousandth here."""
    hidden, tokens = drawn(64)
    tokens = tokens._replace(log_decay=tokens.log_decay * 100)
    close(fast_chunked(hidden, tokens, chunk=64), plain(hidden, tokens))


@pytest.mark.parametrize("counts", [(0, 11), (3, CHUNK), (CHUNK + 1, 1)])
def test_padding_may_hold_anything(counts):
    """NaN and infinity in every part of rows that do not count leave no trace, bit for bit."""
    hidden, tokens = drawn(11)
    valid = jnp.arange(11) < jnp.array(counts)[:, None]
    states = []
    for filler in (0.0, np.nan, -np.inf):
        dirty = Tokens(*(only(valid, leaf, filler) for leaf in tokens))
        state, outputs = fast_chunked(hidden, counted(dirty, valid), chunk=CHUNK)
        update, read = fast_window(hidden, counted(dirty, valid))
        states.append([state, outputs, update, read])
        wanted_state, wanted = plain(hidden, tokens, counts)
        close([state], [wanted_state])
        for row, count in enumerate(counts):
            close([outputs[row, :count], read[row, :count]], [wanted[row, :count]] * 2)
        np.testing.assert_array_equal(np.array(update)[~np.array(valid)], 0)
    for other in states[1:]:
        for one, two in zip(states[0], other, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(two))


@pytest.mark.parametrize("counts", [(0, 4), (1, 3), (2, 2)])
def test_replay_has_the_bits_of_rows_one_by_one(counts):
    """Whatever the rows after the kept ones hold."""
    hidden, tokens = drawn(4, "weak")
    update, _ = fast_window(hidden, tokens)
    one_row = jax.jit(advance)
    wanted = hidden
    for row in range(4):
        keep = row < np.array(counts)
        decay = jax.jit(jnp.exp)(tokens.log_decay[:, row])
        wanted = one_row(wanted, decay, tokens.key[:, row], update[:, row], keep)
    kept = np.arange(4) < np.array(counts)[:, None]
    parts = Drive(tokens.log_decay, tokens.key, update)
    dirty = Drive(*(only(kept, leaf, np.nan)[None] for leaf in parts))
    found = fast_replay(hidden[None], dirty, jnp.array(counts))
    np.testing.assert_array_equal(np.array(found[0]), np.array(wanted))


def test_gradients_of_chunks_are_those_of_steps():
    """The parallel form is the training pass."""
    hidden, tokens = drawn(CHUNK + 3, "weak")

    def one_by_one(tokens):
        _, out = jax.lax.scan(
            lambda state, one: step(state, one, jnp.ones(BATCH, bool)),
            hidden,
            jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens),
        )
        return jnp.sum(jnp.sin(out))

    found = jax.jit(jax.grad(lambda tokens: jnp.sum(jnp.sin(chunked(hidden, tokens, chunk=CHUNK)[1]))))(tokens)
    close(found, jax.jit(jax.grad(one_by_one))(tokens), 5e-5)


MIXER = GatedDelta(width=10, num_key_heads=2, num_value_heads=4, key_size=6, value_size=5, chunk=4)


def mixer_parts():
    """Returns parameters and planes of the mixer."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = {name: initial(param, next(keys)) for name, param in MIXER.params.items()}
    planes = {
        "conv": jax.random.normal(next(keys), (2, 3, MIXER.conv_width)),
        "hidden": jax.random.normal(next(keys), (2, 4, 6, 5)),
    }
    return params, planes, jax.random.normal(next(keys), (2, 6, 10))


@jax.jit
def extended(params, x, planes, counts):
    out, moved, _ = MIXER.mix(params, x, planes, 0, Chunk("extend", jnp.zeros(2, jnp.int32), counts, 6))
    return out, moved


@jax.jit
def verified(params, x, planes, counts):
    out, moved, kept = MIXER.mix(params, x, planes, 0, Chunk("verify", jnp.zeros(2, jnp.int32), counts, 6))
    assert not moved
    planes, kept = jax.tree.map(lambda leaf: leaf[None], (planes, kept))
    return out, jax.tree.map(lambda leaf: leaf[0], MIXER.replay(planes, kept, counts))


def test_padding_enters_no_plane_of_the_mixer():
    """Nor the trace of a verify, nor the outputs before it; and both ways give one state."""
    params, planes, x = mixer_parts()
    counts = jnp.array([2, 5])
    valid = (np.arange(6) < np.array(counts)[:, None])[..., None]
    results = {}
    for way in (extended, verified):
        for filler in (0.0, np.nan):
            out, moved = way(params, jnp.where(valid, x, filler), planes, counts)
            results[way, str(filler)] = [np.where(valid, out, 0), np.array(moved["conv"]), np.array(moved["hidden"])]
        for clean, dirty in zip(results[way, "0.0"], results[way, "nan"], strict=True):
            np.testing.assert_array_equal(clean, dirty)
    close(results[extended, "nan"], results[verified, "nan"])

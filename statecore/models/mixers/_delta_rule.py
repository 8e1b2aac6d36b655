"""The gated delta rule (arXiv 2412.06464) in the forms we need.

A token first lets the state fade, then corrects what it holds under the token's key:
`S' = exp(g) S + k u^T` where `u = beta (v - exp(g) S^T k)`, and reads `S'^T q`. Once `u` is
known this is the scalar-decay recurrence: its `advance` moves the state here too, and its
`replay` replays a window from the decays, keys and updates that were kept.

`step` is one token. `window` reads the updates and outputs of a few tokens and leaves the
state alone: each update needs those before it, which is a triangular system. `chunked` is
the parallel form, used to train and to read prompts: the systems of all chunks are solved
at once, and a scan passes the state from chunk to chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from statecore.models.mixers._recurrence import advance, decay_between


class Tokens(NamedTuple):
    """What tokens bring to the recurrence, in float32 and for each of `H` heads.

    query: `[..., T, H, K]`.
    key: `[..., T, H, K]`, of length one.
    value: `[..., T, H, V]`.
    log_decay: `[..., T, H]`, at most 0.
    beta: `[..., T, H]`, from 0, which adds nothing, to 1, which replaces what the state held.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class _Chunk(NamedTuple):
    """What the tokens of a chunk are to each other, whatever the state before it is.

    query, key: `[..., H, T, K]`, faded as the state before the chunk is when they read it.
    value: `[..., H, T, V]`.
    beta: `[..., H, T, 1]`.
    scores: `[..., H, T, T]`, what each query reads of the updates.
    inverse: `[..., H, T, T]`, of the system that the updates solve.
    rest: `[..., H, T, K]`, keys as they have faded when the chunk ends.
    whole: `[..., H, 1, 1]`, the decay of all tokens.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    scores: jax.Array
    inverse: jax.Array
    rest: jax.Array
    whole: jax.Array


def counted(tokens: Tokens, valid: jax.Array) -> Tokens:
    """Returns the tokens such that those that are not `valid` `[..., T]` leave every state alone.

    Selected, not multiplied: a row that does not count may hold NaN.
    """
    heads = valid[..., None]
    return Tokens(*(jnp.where(heads if leaf.ndim == heads.ndim else heads[..., None], leaf, 0.0) for leaf in tokens))


def step(hidden: jax.Array, tokens: Tokens, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the state after one token, in the rows where `keep` is true, and the outputs `[B, H, V]`.

    Args:
      hidden: `[B, H, K, V]` float32.
      tokens: leaves `[B, H, ...]`, of one token.
      keep: `[B]` bool.
    """
    decay = jnp.exp(tokens.log_decay)
    held = jnp.einsum("bhkv,bhk->bhv", hidden, tokens.key) * decay[..., None]
    update = (tokens.value - held) * tokens.beta[..., None]
    hidden = advance(hidden, decay, tokens.key, update, keep)
    return hidden, jnp.einsum("bhkv,bhk->bhv", hidden, tokens.query)


def window(hidden: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Returns the updates and the outputs of `T` tokens read from `hidden`, both `[..., T, H, V]`.

    Args:
      hidden: `[..., H, K, V]`, the state before the window.
      tokens: leaves `[..., T, H, ...]`.
    """
    update, outputs = _read(hidden, _chunk(tokens))
    return jnp.swapaxes(update, -3, -2), jnp.swapaxes(outputs, -3, -2)


def chunked(hidden: jax.Array, tokens: Tokens, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Returns the state after `T` tokens and their outputs `[B, T, H, V]`, chunk by chunk.

    Args:
      hidden: `[B, H, K, V]`, the state before the first token.
      tokens: leaves `[B, T, H, ...]`, each of which counts; see `counted`.
      chunk: tokens a chunk; `T` is padded up to a multiple of it.
    """
    batch, length = tokens.beta.shape[:2]
    chunk = max(1, min(chunk, length))
    num_chunks = -(-length // chunk)

    def split(leaf: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, num_chunks * chunk - length)]
        leaf = jnp.pad(leaf, padding + [(0, 0)] * (leaf.ndim - 2))
        return leaf.reshape(batch, num_chunks, chunk, *leaf.shape[2:])

    def pass_state(carry: jax.Array, part: _Chunk) -> tuple[jax.Array, jax.Array]:
        update, outputs = _read(carry, part)
        return carry * part.whole + jnp.swapaxes(part.rest, -1, -2) @ update, outputs

    parts = _chunk(Tokens(*map(split, tokens)))
    hidden, outputs = jax.lax.scan(pass_state, hidden, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), parts))
    outputs = jnp.moveaxis(outputs, (0, 3), (1, 2))  # [B, C, Q, H, V]
    return hidden, outputs.reshape(batch, num_chunks * chunk, *outputs.shape[3:])[:, :length]


def _read(hidden: jax.Array, part: _Chunk) -> tuple[jax.Array, jax.Array]:
    """Returns the updates and the outputs of a chunk, both `[..., H, T, V]`, from the state before it."""
    update = part.inverse @ (part.beta * (part.value - part.key @ hidden))
    return update, part.query @ hidden + part.scores @ update


def _chunk(tokens: Tokens) -> _Chunk:
    per_head = Tokens(*tokens[:3], *(leaf[..., None] for leaf in tokens[3:]))
    query, key, value, log_decay, beta = (jnp.swapaxes(leaf, -3, -2) for leaf in per_head)
    between = decay_between(log_decay[..., 0])
    before = jnp.exp(jnp.cumsum(log_decay, axis=-2))
    across = jnp.swapaxes(key, -1, -2)
    return _Chunk(
        query=query * before,
        key=key * before,
        value=value,
        beta=beta,
        scores=(query @ across) * between,
        inverse=_inverse(beta * (key @ across) * between),
        rest=key * between[..., -1, :, None],
        whole=before[..., -1:, :],
    )


def _inverse(lower: jax.Array) -> jax.Array:
    """Returns the inverse of the identity plus what is below the diagonal of `lower` `[..., T, T]`.

    Its entries are at most 1 in size, as no update of the delta rule is amplified by another.
    """
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True, unit_diagonal=True)

"""The record between a verify and its commit."""

import dataclasses

import jax
from jax.tree_util import register_dataclass

from statecore._typing import PyTree
from statecore.backend._backend import Origin


@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A verified window, and the state that waits for its commit.

    As a value it may be committed at several counts; `commit(..., donate=True)` consumes
    its state.

    state: the state before the window, with the window's attention rows written.
    logits: `[B, K, V]`; row `i` predicts the token after window token `i`. NaN in
      padding rows.
    num_valid: `[B]` int32, how many rows count.
    trace: what makes any prefix of the window the state.
    mode: `exact` (single steps scanned: the bits of decoding) or `fast` (batched).
    origin: which backend made it.
    """

    state: PyTree
    logits: jax.Array  # [B, K, V]
    num_valid: jax.Array  # [B]
    trace: PyTree
    mode: str = dataclasses.field(metadata={"static": True})
    origin: Origin = dataclasses.field(metadata={"static": True})

"""Hypothesis strategies for the inputs of the laws. Needs the extra `testing`."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st


class Batch(NamedTuple):
    """Tokens of some sequences, how many of each are valid, and how many are kept.

    tokens: `[B, T]` int32.
    num_valid: `[B]`, from 0 to `T`.
    num_accepted: `[B]`, from 0 to `num_valid`.
    """

    tokens: np.ndarray
    num_valid: list[int]
    num_accepted: list[int]


def tokens(*, vocab_size: int, batch: int, length: int) -> st.SearchStrategy[np.ndarray]:
    """Generates `[batch, length]` int32 tokens from 0 to `vocab_size - 1`."""
    row = st.lists(st.integers(0, vocab_size - 1), min_size=length, max_size=length)
    rows = st.lists(row, min_size=batch, max_size=batch)
    return rows.map(lambda value: np.array(value, np.int32).reshape(batch, length))


def cuts(*, length: int, max_cuts: int = 3) -> st.SearchStrategy[list[int]]:
    """Generates places to cut a text of `length` tokens, ascending, repeats allowed."""
    return st.lists(st.integers(0, length), max_size=max_cuts).map(sorted)


@st.composite
def windows(draw: st.DrawFn, *, vocab_size: int, batch: int, width: int) -> Batch:
    """Generates windows of `width` rows with valid and kept counts, 0 and all included.

    Padding holds numbers outside the vocabulary, which must not matter.
    """
    array = draw(tokens(vocab_size=vocab_size, batch=batch, length=width))
    counts = st.lists(st.integers(0, width), min_size=batch, max_size=batch)
    num_valid = draw(counts)
    num_accepted = [draw(st.integers(0, most)) for most in num_valid]
    padding = np.arange(width) >= np.array(num_valid)[:, None]
    return Batch(np.where(padding, -7, array).astype(np.int32), num_valid, num_accepted)


def batches(*, vocab_size: int, batch: int, length: int) -> st.SearchStrategy[Batch]:
    """Generates padded chunks: as `windows`, for prompts."""
    return windows(vocab_size=vocab_size, batch=batch, width=length)

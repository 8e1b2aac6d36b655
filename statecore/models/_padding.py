"""Padded batches as other libraries make them."""

import numpy as np
from numpy.typing import ArrayLike

from statecore._errors import GeometryError


def right_padded(tokens: ArrayLike, mask: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns a padded batch as `extend` takes it: tokens first, and how many there are.

    A state knows no padding: a sequence begins at position 0 with its first token.

    Args:
      tokens: `[B, T]` ids, padded on the left or on the right.
      mask: `[B, T]`, true or 1 where a token counts; those of a row are next to each other.

    Returns:
      tokens `[B, T]` int32 that begin at column 0, and `num_valid` `[B]`.

    Raises:
      GeometryError: the shapes differ, or a row has padding between its tokens.
    """
    ids, counted = np.array(tokens, np.int32), np.array(mask).astype(bool)
    if ids.ndim != 2 or ids.shape != counted.shape:
        raise GeometryError(
            f"tokens and mask must both be [B, T], but are {list(ids.shape)} and {list(counted.shape)}."
        )
    num_valid, first = counted.sum(axis=1), counted.argmax(axis=1)
    split = (_rolled(counted, first) != (np.arange(ids.shape[1]) < num_valid[:, None])).any(axis=1)
    if split.any():
        raise GeometryError(
            f"Row {int(split.argmax())} has padding between its tokens, which no sequence has. Is this the mask of "
            "these tokens?"
        )
    return _rolled(ids, first), num_valid


def _rolled(rows: np.ndarray, first: np.ndarray) -> np.ndarray:
    return np.array([np.roll(row, -start) for row, start in zip(rows, first, strict=True)]).reshape(rows.shape)

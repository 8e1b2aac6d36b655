"""Checks on the host, before anything runs. Each either returns or raises.

They take lengths as NumPy arrays, so that a caller who keeps a mirror of them never
waits for the device.
"""

from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import CapacityError, GeometryError, RefusedError, RollbackError, UnsupportedError
from statecore._typing import IntLike
from statecore.state import Layout


def host_ints(value: IntLike, what: str) -> np.ndarray:
    """Returns `value` as an int64 array of its own; refuses floats and booleans."""
    try:
        array = np.array(value)  # a copy: a view would cost the array its donation
        if array.dtype == object:
            raise ValueError
    except (ValueError, OverflowError):
        raise GeometryError(
            f"{what} must be an array of integers with rows of one length, but are {value!r}."
        ) from None
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise GeometryError(f"{what} must be integers, but are {array.dtype}.")
    return array.astype(np.int64)


def whole(value: object, what: str, *, least: int = 0) -> int:
    """Returns `value` as an int; raises GeometryError unless it is a whole number of at least `least`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral) or int(value) < least:
        raise GeometryError(f"{what} must be a whole number of at least {least}, but is {value!r}.")
    return int(value)


def check_logits(logits: str) -> None:
    """Raises UnsupportedError unless `logits` is `all`, `last` or `none`."""
    if logits not in ("all", "last", "none"):
        raise UnsupportedError(f"logits={logits!r} is not one of all, last, none.")


def traced_ints(value: IntLike, what: str, shape: tuple[int | None, ...]) -> jax.Array:
    """Returns `value` as integers inside a trace, where only dtype and shape can be checked.

    The dtype stays, so that the caller compares a wide value before it narrows it.

    Args:
      value: traced or not.
      what: for the message.
      shape: needed; None stands for any extent.
    """
    if not isinstance(value, jax.Array):
        array = host_ints(value, what)
        if array.size and (abs(array) > np.iinfo(np.int32).max).any():
            raise GeometryError(f"{what} {array.tolist()} are larger than any token, count or row can be.")
        value = jnp.asarray(array.astype(np.int32))
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise GeometryError(f"{what} must be integers, but are {value.dtype}.")
    fits = value.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
    if not fits:
        needed = ["any" if extent is None else extent for extent in shape]
        raise GeometryError(f"{what} have shape {list(value.shape)}, but must have {needed}.")
    return value


def check_tokens(tokens: IntLike, batch: int, num_axes: int) -> np.ndarray:
    """Returns tokens on the host, `[B]` or `[B, T]`; raises GeometryError for other shapes."""
    array = host_ints(tokens, "tokens")
    if array.ndim != num_axes or array.shape[0] != batch:
        needed = f"[{batch}]" if num_axes == 1 else f"[{batch}, T]"
        raise GeometryError(
            f"tokens have shape {list(array.shape)}, but this state takes {needed}: one row a sequence."
        )
    return array


def check_window(shape: tuple[int, ...]) -> None:
    """Raises GeometryError for a window without rows."""
    if len(shape) != 2 or shape[1] < 1:
        raise GeometryError(f"A window is [B, K] with at least one row, the anchor, but has shape {list(shape)}.")


def check_vocab(tokens: np.ndarray, valid: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """Returns int32 tokens with padding as 0; raises GeometryError outside the vocabulary."""
    if valid is not None:
        tokens = np.where(valid, tokens, 0)
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if wrong.size:
        raise GeometryError(
            f"Token {wrong[0]} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}). "
            "Does the tokenizer belong to this model?"
        )
    return tokens.astype(np.int32)


def check_rows_counts(counts: IntLike | None, batch: int, most: int, what: str) -> np.ndarray:
    """Returns counts `[B]` between 0 and `most`; an int is every row's; None is `most`."""
    array = host_ints(most if counts is None else counts, what)
    if array.ndim == 0:
        array = np.full(batch, array)
    if array.shape != (batch,):
        raise GeometryError(f"{what} has shape {list(array.shape)}, but there are {batch} sequences.")
    if array.size and (array.min() < 0 or array.max() > most):
        raise GeometryError(f"{what} is {array.tolist()}, but must lie between 0 and the {most} rows given.")
    return array


def check_accepted(num_accepted: IntLike, num_valid: np.ndarray) -> np.ndarray:
    """Returns rows kept `[B]`; raises RollbackError unless 0 <= rows <= valid, per row."""
    array = host_ints(num_accepted, "num_accepted")
    if array.ndim == 0:
        array = np.full(num_valid.shape, array)
    if array.shape != num_valid.shape:
        raise GeometryError(f"num_accepted has shape {list(array.shape)}, but there are {len(num_valid)} sequences.")
    wrong = np.flatnonzero((array < 0) | (array > num_valid))
    if wrong.size:
        row = wrong[0]
        raise RollbackError(
            f"num_accepted is {array[row]} for sequence {row}, but its window has {num_valid[row]} valid rows: "
            "0 keeps nothing, the number of rows keeps all. It counts rows, the anchor included; was it "
            "counted in drafts, or against another window?"
        )
    return array


def check_opaque(layout: Layout, num_accepted: np.ndarray, num_valid: np.ndarray) -> None:
    """Raises RollbackError if rows are dropped and a plane cannot be taken back."""
    opaque = layout.indices("opaque")
    if opaque and (num_accepted != num_valid).any():
        paths = ", ".join(f"`{layout.paths[i]}`" for i in opaque)
        raise RollbackError(
            f"num_accepted {num_accepted.tolist()} drops rows of a window of {num_valid.tolist()}, but nothing "
            f"undoes the opaque plane {paths}. Keep all rows, or declare how the plane is undone."
        )


def check_lengths(lengths: np.ndarray) -> None:
    """Raises RefusedError if a transition inside a trace was refused earlier."""
    if (lengths < 0).any():
        true = np.where(lengths < 0, ~lengths, lengths)
        raise RefusedError(
            f"A transition inside a trace was refused at lengths {true.tolist()} and left this state as it was: "
            "a count, row or token was out of range, or the capacity was exceeded. Check them before the traced "
            "call; `clear_refusal` gives the state back as it was before."
        )


def check_room(layout: Layout, lengths: np.ndarray, num_new: np.ndarray, capacity: int | None) -> None:
    """Raises CapacityError if the new tokens do not fit the append planes."""
    if capacity is None:
        return
    wrong = np.flatnonzero(lengths + num_new > capacity)
    if wrong.size:
        row = wrong[0]
        paths = ", ".join(f"`{layout.paths[i]}`" for i in layout.indices("append"))
        raise CapacityError(
            f"{num_new[row]} tokens do not fit sequence {row}: it holds {lengths[row]} of {capacity} rows in "
            f"{paths}. Was the state made with too small a `capacity`?"
        )


def check_undo(limit: tuple[int, str] | None, num_valid: np.ndarray) -> None:
    """Raises RollbackError if a ring could not undo a window this wide."""
    if limit is None or not num_valid.size or num_valid.max() <= limit[0]:
        return
    raise RollbackError(
        f"A window of {num_valid.max()} rows cannot be undone: the ring `{limit[1]}` can undo {limit[0]}, its rows "
        "less its attention window plus one. Verify fewer rows at once, or give the ring more."
    )

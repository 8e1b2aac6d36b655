"""What a draw must be given, checked on the host before anything runs."""

import numpy as np

from statecore._errors import GeometryError, UnsupportedError
from statecore.generation._sampler import Sampler
from statecore.generation._sampler_state import SamplerState


def check_shapes(sampler, state: SamplerState, indices, logits, window, allowed, forced, live) -> None:
    """Raises GeometryError unless everything has the batch, rows and vocabulary of the logits."""
    if logits.ndim not in (2, 3):
        raise GeometryError(f"logits must be [B, K, V] or [B, V], but are {list(logits.shape)}.")
    batch, vocab_size = logits.shape[0], logits.shape[-1]
    width = 1 if logits.ndim == 2 else logits.shape[1]
    needed = {
        "indices": (indices, (batch, width)),
        "window": (window, (batch, width)),
        "allowed": (allowed, (batch, width, vocab_size)),
        "forced": (forced, (batch,)),
        "live": (live, (batch, width)),
        "counts of the sampler state": (state.counts, (batch, vocab_size)),
        "mu of the sampler state": (state.mu, (batch,)),
    }
    for name, (array, shape) in needed.items():
        if array is not None and tuple(array.shape) != shape:
            raise GeometryError(f"{name} must be {list(shape)} for these logits, but is {list(array.shape)}.")
    if sampler.uses_penalties and width > 1 and window is None:
        raise GeometryError(
            f"Penalties over {width} rows need the window's tokens, so that each row counts its drafts."
        )


def check_state(sampler: Sampler, state: SamplerState) -> None:
    """Raises UnsupportedError if the state lacks what the sampler needs."""
    if not sampler.is_greedy and state.key is None:
        raise UnsupportedError(
            f"temperature is {sampler.temperature}, but the run has no key to draw with. Was it begun greedy, without "
            "a seed? Give a seed."
        )
    if sampler.uses_penalties and state.counts is None:
        raise UnsupportedError(
            "The sampler has penalties, but its state counts no tokens. Was it made for other settings? Use "
            "`initial_state` or `overridden`."
        )
    if sampler.mirostat is not None and state.mu is None:
        raise UnsupportedError("The sampler uses Mirostat, but its state has no mu. Was it made for other settings?")


def check_choices(vocab_size: int, allowed, forced, live) -> None:
    """Raises GeometryError or UnsupportedError for forced tokens or masks that leave a live row no choice."""
    if forced is not None:
        forced = np.asarray(forced)
        if ((forced < -1) | (forced >= vocab_size)).any():
            raise GeometryError(f"Forced tokens must lie between 0 and {vocab_size - 1}, or be -1: {forced.tolist()}.")
    if allowed is None:
        return
    allowed = np.asarray(allowed)
    stuck = ~allowed.any(axis=-1) & (True if live is None else np.asarray(live))
    if stuck.any():
        row, index = np.argwhere(stuck)[0]
        raise UnsupportedError(
            f"The constraint of sequence {row} allows no token in window row {index}. Is it complete, or can it not "
            "be met with this vocabulary?"
        )
    if forced is not None:
        rows = np.flatnonzero(forced >= 0)
        wrong = rows[~allowed[rows, 0, forced[rows]]]
        if wrong.size:
            raise UnsupportedError(
                f"The token {forced[wrong[0]]} forced on sequence {wrong[0]} is not allowed by its constraint."
            )

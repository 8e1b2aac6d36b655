"""Prompts: from what a user gives to rows of tokens, and those into the state."""

from collections.abc import Sequence

import jax
import numpy as np

from statecore._errors import GeometryError, UnsupportedError
from statecore.backend import Tokenizer, checks
from statecore.runtime import Runtime

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | np.ndarray | jax.Array

# A prompt is fed in padded chunks of these lengths, so that a prompt of any length costs
# at most one compile for each of them.
CHUNK_LENGTHS = (16, 128)


def prompt_rows(prompt: Prompt, batch: int, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns one list of tokens a sequence.

    Raises:
      GeometryError: not one prompt a sequence, or an empty one.
      UnsupportedError: text, but the model has no tokenizer.
    """
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.array(prompt).tolist()
    if not isinstance(prompt, Sequence):
        raise GeometryError(f"A prompt is text, token ids, or a list of either, not {type(prompt).__name__}.")
    is_one = isinstance(prompt, str) or (len(prompt) > 0 and np.ndim(prompt[0]) == 0 and not isinstance(prompt[0], str))
    rows = [prompt] if is_one else list(prompt)
    if len(rows) != batch:
        raise GeometryError(f"{len(rows)} prompts were given to a runtime of batch {batch}. Give one a sequence.")
    tokens = [_tokens(row, tokenizer) for row in rows]
    for number, row in enumerate(tokens):
        if not row:
            raise GeometryError(
                f"Prompt {number} is empty, but the first token must follow something. Give at least one token, "
                "such as a newline or the model's start token."
            )
    return tokens


def _tokens(row, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(row, str):
        tokens = checks.host_ints(row, "a prompt's tokens")
        if tokens.ndim != 1:
            raise GeometryError(f"A prompt is text or a list of token ids, not {row!r}.")
        return tokens.tolist()
    if tokenizer is None:
        raise UnsupportedError("The prompt is text, but this model was loaded without a tokenizer. Give token ids.")
    return tokenizer.encode(row)


def feed(runtime: Runtime, rows: list[list[int]]) -> None:
    """Advances the runtime over `rows`, which may differ in length, chunk by chunk."""
    longest = max(len(row) for row in rows)
    start = 0
    while start < longest:
        left = longest - start
        length = next((size for size in CHUNK_LENGTHS if size >= left), CHUNK_LENGTHS[-1])
        chunk = np.zeros((len(rows), length), np.int32)
        counts = np.zeros(len(rows), np.int32)
        for number, row in enumerate(rows):
            part = row[start : start + length]
            chunk[number, : len(part)] = part
            counts[number] = len(part)
        runtime.extend(chunk, num_valid=counts, logits="none")
        start += length

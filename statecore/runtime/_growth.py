"""What a runtime's state may grow to, where its sequences have different ends."""

from collections.abc import Sequence

from statecore.native import estimate_growth
from statecore.state import Geometry


def growth(geometry: Geometry, lengths: list[int], num_tokens: int | Sequence[int], bucket: int | None) -> int | None:
    """Returns the bytes that more tokens will hold; None if unknown or too many.

    Args:
      geometry: of the state.
      lengths: of each sequence.
      num_tokens: more of each, or one number for all.
      bucket: as for `statecore.estimate_growth`.
    """
    if not isinstance(num_tokens, Sequence):
        return estimate_growth(geometry, lengths, num_tokens, bucket=bucket)
    pairs = list(zip(lengths, num_tokens, strict=True))
    if bucket is not None:  # one array holds all sequences, so that the longest one decides
        longest = max(lengths)
        return estimate_growth(geometry, longest, max(map(sum, pairs)) - longest, bucket=bucket)
    # Each is priced as a batch of sequences like it, of which it is one.
    grown = [estimate_growth(geometry, *pair) for pair in pairs]
    known = [size // geometry.batch for size in grown if size is not None]
    return sum(known) if len(known) == len(grown) else None

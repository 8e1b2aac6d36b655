"""What a branch may come to hold, known before it is copied."""

from statecore._errors import BudgetError
from statecore.generation._run import Run
from statecore.runtime import Runtime, Slot


def growth(runtime: Runtime, slot: Slot, run: Run) -> int:
    """Returns the bytes that `run` may add to `slot`, each sequence from its own length to its own end.

    Raises:
      BudgetError: they are unknown, or there is no state to hold that many tokens.
    """
    more = run.num_inputs()
    size = runtime.estimate_growth(slot, more)
    if size is not None:
        return size
    if runtime.estimate_growth(slot, 0) is None:
        raise BudgetError("What this branch may grow to is unknown, so it cannot run; the snapshot stays usable.")
    wanted = [length + num for length, num in zip(slot.lengths.tolist(), more, strict=True)]
    raise BudgetError(
        f"This branch may come to hold {wanted} tokens, which do not fit: they are beyond the capacity, a position of "
        "32 bits or a size of 64. Give a smaller `max_tokens`; the snapshot stays usable."
    )

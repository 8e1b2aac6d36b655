"""Bytes of saved sequences, from the declared planes alone: one function for estimate and allocation."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from statecore._errors import GeometryError
from statecore._typing import PyTree
from statecore.backend import checks
from statecore.state import Geometry

# What a sequence keeps of a fixed size, whatever its length; a pool holds these unless told otherwise.
POOLED_KINDS = ("position", "shift", "recurrent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """How many copies of a sequence's recurrent and shift planes are to be kept, and what for.

    live: sequences being generated.
    verify: for each sequence that may verify, the recurrent steps and the shift steps
      kept of a window; each also keeps one checkpoint of both.
    ring: states kept for going back to an earlier boundary, over all sequences.
    snapshots: slots of a pool.
    replay_rows: rows of inputs kept for a replay, over all sequences.
    """

    live: int = 0
    verify: tuple[tuple[int, int], ...] = ()
    ring: int = 0
    snapshots: int = 0
    replay_rows: int = 0


def sequence_bytes(geometry: Geometry, *kinds: str) -> int | None:
    """Returns the bytes that one sequence takes in the planes of these kinds; None if unknown.

    Raises:
      GeometryError: a recurrent or shift plane is declared with no elements, so that each
        checkpoint of it would silently copy nothing.
    """
    sizes = []
    for plane in geometry.planes:
        if plane.plane.kind not in kinds:
            continue
        if plane.plane.kind in ("recurrent", "shift") and math.prod(plane.shape) == 0:
            raise GeometryError(
                f"Plane `{plane.path}` of {geometry.name} is {plane.describe()}, which has no elements, so that "
                "every checkpoint of it would copy nothing. Was its size read from a setting that this model does "
                "not have? Leave a plane that the model lacks out, as None."
            )
        sizes.append(plane.nbytes)
    known = [size for size in sizes if size is not None]
    return sum(size // geometry.batch for size in known) if len(known) == len(sizes) else None


def pool_bytes(geometry: Geometry, num_slots: int, *, kinds: Sequence[str] = POOLED_KINDS) -> int | None:
    """Returns the bytes of a `SnapshotPool` of `num_slots` slots and the dummy; None if unknown.

    Args:
      geometry: of states of the model, at any batch.
      num_slots: slots that can be claimed; a pool of none allocates nothing.
      kinds: the kinds of planes that the pool holds.

    Raises:
      GeometryError: as `sequence_bytes`.
    """
    each = sequence_bytes(geometry, *kinds)
    if each is None:
        return None
    return (num_slots + 1) * each if num_slots else 0


def plan_bytes(geometry: Geometry, plan: SlotPlan, *, inputs: PyTree = ()) -> int | None:
    """Returns the bytes that `plan` takes for the model of `geometry`; None if unknown.

    Args:
      geometry: of states of the model, at any batch.
      plan: what is kept, dummies counted by the caller.
      inputs: the shapes and dtypes that a replay keeps of one row of one sequence.

    Raises:
      GeometryError: as `sequence_bytes`.
    """
    recurrent, shift = sequence_bytes(geometry, "recurrent"), sequence_bytes(geometry, "shift")
    if recurrent is None or shift is None:
        return None
    whole = plan.live + len(plan.verify) + plan.ring + plan.snapshots
    row = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(inputs))
    return (
        whole * (recurrent + shift)
        + sum(steps for steps, _ in plan.verify) * recurrent
        + sum(steps for _, steps in plan.verify) * shift
        + plan.replay_rows * row
    )


def verify_tiers(num_slots: int, ladder: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Returns how many drafts each verify slot must be ready for.

    Args:
      num_slots: slots that may verify.
      ladder: pairs `(sequences, drafts)`: up to so many sequences at once draft so much.

    Returns:
      for slot `s`, the most drafts of any width above `s`; 0 for a slot that none reaches.
    """
    return tuple(
        max((drafts for sequences, drafts in ladder if sequences > slot), default=0) for slot in range(num_slots)
    )


def draft_limit(tiers: Sequence[int], active: Sequence[int]) -> int | None:
    """Returns how many drafts every one of the active verify slots is ready for; None if none is active.

    Args:
      tiers: by slot, from `verify_tiers`; a slot beyond them is ready for none.
      active: the slots of the sequences that verify together.

    Raises:
      GeometryError: a slot is not a whole number.
    """
    slots = [checks.whole(slot, "A verify slot") for slot in active]
    return min((tiers[slot] if slot < len(tiers) else 0 for slot in slots), default=None)

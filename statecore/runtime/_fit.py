"""Whether a slot may be installed in a runtime: identity, then geometry."""

import operator

import jax
import numpy as np

from statecore._errors import BudgetError, CapacityError, GeometryError, IdentityError, UnsupportedError
from statecore._pytree import any_gone, check_alive
from statecore.backend import Identity, checks
from statecore.native import SnapshotBudget, row_extents
from statecore.runtime._installed import read_only
from statecore.runtime._slot import Slot
from statecore.state import Geometry, validate

MODES = ("fresh", "lazy", "compact")


def check_capture_mode(mode: str) -> None:
    """Raises UnsupportedError unless `mode` is one of a capture's."""
    if mode not in MODES:
        raise UnsupportedError(f"mode={mode!r} is not one of {', '.join(MODES)}.")


def check_is_budget(budget: object) -> None:
    """Raises BudgetError for what is neither a budget nor None."""
    if budget is not None and not isinstance(budget, SnapshotBudget):
        raise BudgetError(f"`budget` must be a SnapshotBudget, but is {budget!r}.")


def check_is_slot(slot: object) -> None:
    """Raises GeometryError for what is no slot."""
    if not isinstance(slot, Slot):
        raise GeometryError(f"A slot is needed, such as `capture` returns, but this is a {type(slot).__name__}.")


def check_identity(slot: Slot, identity: Identity, name: str) -> None:
    """Raises IdentityError unless the slot comes from this load and these weights."""
    if slot.identity is identity or slot.identity == identity:
        return
    what = "other weights" if slot.identity.load is identity.load else "another load of a model"
    raise IdentityError(
        f"This slot was captured from {what}, so its state means nothing to this {name}, even if every shape fits. "
        "Capture it from a runtime of this load."
    )


def check_fillable(geometry: Geometry, lengths: np.ndarray) -> None:
    """Raises unless a state of this geometry can hold `lengths` `[B]`.

    Raises:
      RefusedError: a negative length marks a transition that was refused inside a trace.
      CapacityError: a length is beyond the rows of an append plane.
    """
    checks.check_lengths(lengths)
    longest = max(lengths.tolist(), default=0)
    for plane, rows in zip(geometry.planes, row_extents(geometry), strict=True):
        if rows is not None and longest > rows:
            raise CapacityError(
                f"Position plane `{geometry.layout.paths[geometry.layout.position]}` holds {lengths.tolist()}, but "
                f"append plane `{plane.path}` has {rows} rows, one a token. Was the position edited, or is the state "
                "of a larger capacity?"
            )


def check_devices(geometry: Geometry, leaves: list[jax.Array], installed: list[jax.Array]) -> None:
    """Raises GeometryError for a plane on devices that no call of this runtime could take it from."""
    for plane, leaf, own in zip(geometry.planes, leaves, installed, strict=True):
        # JAX moves what was never put anywhere, and refuses to move the rest.
        if not leaf.committed or leaf.sharding.device_set == own.sharding.device_set:
            continue
        everywhere = set().union(*(leaf.sharding.device_set for leaf in installed))
        if leaf.sharding.device_set != everywhere:
            found, needed = (sorted(map(str, devices)) for devices in (leaf.sharding.device_set, everywhere))
            raise GeometryError(
                f"Plane `{plane.path}` of this slot is on {found}, but the state of this runtime is on {needed}. Was "
                "it moved by hand? Put it back by `jax.device_put`."
            )


def fitting_leaves(slot: Slot, geometry: Geometry, installed: list[jax.Array]) -> list[jax.Array]:
    """Returns the slot's leaves, alive and of this very geometry.

    What fitted once is recognised by its arrays, which cannot change: then only their
    aliveness is looked at. The seal is compared by identity, so that a plane put into the
    slot by hand is checked like any other. `installed` are the arrays of the runtime's state.

    Raises:
      StateConsumedError: a plane is gone.
      GeometryError: names every plane that does not fit, or one that is on another device;
        or the lengths are not the position's.
      RefusedError, CapacityError: no state can hold these lengths.
    """
    seal = slot.use.seal
    if seal is not None and seal[0] is geometry and seal[2] is slot.lengths:
        leaves = _sealed_leaves(slot, geometry, seal[1])
        if leaves is not None:
            return leaves
    leaves = _matching_leaves(slot, geometry)
    if leaves is None:
        validate(geometry, slot.state)  # words what is wrong
        leaves = geometry.layout.leaves(slot.state)
    if not isinstance(slot.lengths, np.ndarray):
        raise GeometryError(
            f"The lengths of this slot are a {type(slot.lengths).__name__}, {slot.lengths!r}, but must be an array of "
            "NumPy. Was it replaced by hand?"
        )
    found = np.array(leaves[geometry.layout.position])
    if not np.array_equal(found, slot.lengths):
        raise GeometryError(
            f"This slot says that it holds {np.array(slot.lengths).tolist()} tokens, but its position plane "
            f"`{geometry.layout.paths[geometry.layout.position]}` holds {found.tolist()}. Was one replaced without the "
            "other?"
        )
    check_fillable(geometry, found)
    check_devices(geometry, leaves, installed)
    slot.use.seal = geometry, leaves, read_only(slot.lengths)
    return leaves


def _sealed_leaves(slot: Slot, geometry: Geometry, sealed: list[jax.Array]) -> list[jax.Array] | None:
    try:
        leaves = geometry.layout.treedef.flatten_up_to(slot.state)
    except ValueError:
        return None  # another structure, which the full check words
    if not all(map(operator.is_, leaves, sealed)):
        return None
    if any_gone(leaves):
        check_alive(zip(geometry.layout.paths, leaves, strict=True), "slot")
    return leaves


def _matching_leaves(slot: Slot, geometry: Geometry) -> list[jax.Array] | None:
    """Returns the leaves if each is alive and of its plane's shape and dtype, without making a name; else None."""
    try:
        leaves = geometry.layout.treedef.flatten_up_to(slot.state)
    except ValueError:
        return None
    for leaf, plane in zip(leaves, geometry.planes, strict=True):
        if not isinstance(leaf, jax.Array) or leaf.is_deleted():
            return None
        if leaf.shape != plane.shape or leaf.dtype != plane.dtype:
            return None
    return leaves

"""Going back to the last well-formed place of a text, to let it go on differently.

The rules are those of `statecore.ssm`; here a saved point is the state as it was when a
boundary token had been chosen and was still pending.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import GeometryError, UnsupportedError
from statecore._pytree import copy_leaves
from statecore._typing import PyTree
from statecore.backend import checks
from statecore.generation._row import Row
from statecore.runtime import Runtime
from statecore.ssm import Decision, Ring, SequenceState, plan_boundary_rollback

# What no length undoes.
_SAVED = ("shift", "recurrent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedBoundary:
    """What must be put back to go on from a boundary token.

    planes: by plane index, copies of the shift and recurrent planes.
    mu: Mirostat's, then; a text without recurrent state saves nothing and starts it anew.
    """

    planes: dict[int, jax.Array]
    mu: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundarySaves:
    """The saved boundaries of one text. Immutable; a snapshot shares it.

    mask: `[V]` bool, the tokens that end a line or a sentence.
    ring: which of them are saved; positions count prompt and output, the pending token included.
    held: by ring slot.
    highest: the highest state row ever written plus one, which limits what a ring can undo.
    """

    mask: np.ndarray
    ring: Ring
    held: dict[int, SavedBoundary] = dataclasses.field(default_factory=dict)
    highest: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the saved planes."""
        return sum(plane.nbytes for saved in self.held.values() for plane in saved.planes.values())

    def wrote(self, length: int) -> Self:
        """Notes that rows up to `length` were written, kept or not."""
        return self if length <= self.highest else dataclasses.replace(self, highest=length)

    def saved(self, runtime: Runtime, row: Row, mu: jax.Array | None) -> Self:
        """Returns the saves with this point, if the pending token is a boundary."""
        if not row.output or not self.mask[row.pending] or not self.ring.num_slots:
            return self
        layout = runtime.geometry.layout
        leaves = layout.leaves(runtime.state)
        planes = copy_leaves({i: leaves[i] for i in layout.indices(*_SAVED)})
        saved = SavedBoundary(planes=planes, mu=mu)
        ring, slot = self.ring.record(len(row.prompt) + len(row.output))
        return dataclasses.replace(self, ring=ring, held=self.held | {slot: saved})

    def plan(self, runtime: Runtime, row: Row, min_keep: int, *, num_rollbacks: int, is_streamed: bool) -> Decision:
        """Decides as `statecore.ssm.plan_boundary_rollback` does; changes nothing."""
        text = np.array([*row.prompt, *row.output], np.int32)
        seq = SequenceState(
            backend=runtime.model.backend,
            state=runtime.state,
            tokens=(text,),
            strategy="select",
            highest=np.array([self.highest + 1]),  # counted as the text is here, with the pending token
            ring=self.ring,
        )
        return plan_boundary_rollback(
            seq,
            self.mask,
            num_prompt=len(row.prompt),
            min_drop=min_keep,
            num_rollbacks=num_rollbacks,
            is_streamed=is_streamed,
        )

    def state_at(self, runtime: Runtime, decision: Decision) -> PyTree:
        """Returns the state at the boundary that `plan` has just decided on; it shares rows with the installed one."""
        layout, length = runtime.geometry.layout, decision.target - 1
        leaves = layout.leaves(runtime.state)
        if decision.slot is not None:
            for i, plane in copy_leaves(self.held[decision.slot].planes).items():
                leaves[i] = plane
        return layout.with_lengths(layout.unflatten(leaves), jnp.array([length], jnp.int32))

    def truncated(self, decision: Decision) -> Self:
        """Returns the saves without what came after the boundary, whose own save stays."""
        ring = self.ring.truncated(decision.target)
        held = {entry.slot: self.held[entry.slot] for entry in ring.entries}
        return dataclasses.replace(self, ring=ring, held=held)


def make_saves(runtime: Runtime, mask: np.ndarray | None, num_slots: int) -> BoundarySaves | None:
    """Returns the empty saves of a text; None if its boundaries are not known.

    Raises:
      UnsupportedError: slots were asked for and there is no mask, or several sequences.
      GeometryError: the mask is not one bool for each token.
    """
    checks.whole(num_slots, "boundary_slots")
    if mask is None:
        if num_slots:
            raise UnsupportedError("Boundary slots need to know the boundaries: pass `boundaries=`, a mask `[V]`.")
        return None
    if runtime.geometry.batch != 1:
        raise UnsupportedError(
            f"A boundary rollback is of one text, but this runtime has {runtime.geometry.batch} sequences."
        )
    mask = np.array(mask)
    if mask.shape != (runtime.vocab_size,) or mask.dtype != bool:
        raise GeometryError(
            f"The boundary mask must be bool [{runtime.vocab_size}], but is {mask.dtype}{list(mask.shape)}."
        )
    return BoundarySaves(mask=mask, ring=Ring(num_slots))

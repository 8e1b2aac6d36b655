"""Recurrent state around a verify: checkpoint, rollback, commit, ring, boundary."""

from statecore.ssm._begin import begin as begin
from statecore.ssm._boundary import Decision as Decision
from statecore.ssm._boundary import Decline as Decline
from statecore.ssm._boundary import apply_boundary_rollback as apply_boundary_rollback
from statecore.ssm._boundary import boundary_mask as boundary_mask
from statecore.ssm._boundary import plan_boundary_rollback as plan_boundary_rollback
from statecore.ssm._finite import check_finite as check_finite
from statecore.ssm._marconi import marconi_checkpoint as marconi_checkpoint
from statecore.ssm._marconi import snapshot_occupancy as snapshot_occupancy
from statecore.ssm._operations import checkpoint as checkpoint
from statecore.ssm._operations import commit_accepted_prefix as commit_accepted_prefix
from statecore.ssm._operations import extend as extend
from statecore.ssm._operations import has_ssm_layers as has_ssm_layers
from statecore.ssm._operations import rollback as rollback
from statecore.ssm._operations import rollback_unsupported as rollback_unsupported
from statecore.ssm._operations import step as step
from statecore.ssm._operations import verify as verify
from statecore.ssm._patch import patch as patch
from statecore.ssm._ring import Ring as Ring
from statecore.ssm._ring import RingDepth as RingDepth
from statecore.ssm._ring import choose_ring_slots as choose_ring_slots
from statecore.ssm._ring import fit_ring_slots as fit_ring_slots
from statecore.ssm._ring import parse_ring_slots as parse_ring_slots
from statecore.ssm._rows import take_rows as take_rows
from statecore.ssm._saves import restore_ring as restore_ring
from statecore.ssm._saves import ring_slots as ring_slots
from statecore.ssm._saves import save_ring as save_ring
from statecore.ssm._saves import start_checkpoint as start_checkpoint
from statecore.ssm._saves import start_rollback_and_checkpoint as start_rollback_and_checkpoint
from statecore.ssm._saves import sync as sync
from statecore.ssm._sequence import SequenceState as SequenceState
from statecore.ssm._strategy import Plan as Plan
from statecore.ssm._strategy import plan as plan

__all__ = [
    "Decision", "Decline", "Plan", "Ring", "RingDepth", "SequenceState",
    "apply_boundary_rollback", "begin", "boundary_mask", "check_finite", "checkpoint",
    "choose_ring_slots", "commit_accepted_prefix", "extend", "fit_ring_slots",
    "has_ssm_layers", "marconi_checkpoint", "parse_ring_slots", "patch", "plan", "plan_boundary_rollback",
    "restore_ring", "ring_slots", "rollback", "rollback_unsupported", "save_ring", "snapshot_occupancy",
    "start_checkpoint", "start_rollback_and_checkpoint", "step", "sync", "take_rows", "verify",
]  # fmt: skip

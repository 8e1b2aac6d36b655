"""Stores of states: a pool of slots for one sequence each, and what such slots take."""

from statecore.store._pool import SnapshotHandle as SnapshotHandle
from statecore.store._pool import SnapshotPool as SnapshotPool
from statecore.store._sizing import SlotPlan as SlotPlan
from statecore.store._sizing import plan_bytes as plan_bytes
from statecore.store._sizing import pool_bytes as pool_bytes
from statecore.store._sizing import sequence_bytes as sequence_bytes
from statecore.store._sizing import verify_tiers as verify_tiers

__all__ = [
    "SlotPlan", "SnapshotHandle", "SnapshotPool", "plan_bytes", "pool_bytes",
    "sequence_bytes", "verify_tiers",
]  # fmt: skip

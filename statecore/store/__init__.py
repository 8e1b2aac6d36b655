"""Stores of states: a pool of slots, a tree of token prefixes, a cache of prefixes."""

from statecore.store._blocks import BlockStore as BlockStore
from statecore.store._hit import CacheStats as CacheStats
from statecore.store._hit import Hit as Hit
from statecore.store._hit import Lease as Lease
from statecore.store._pool import SnapshotHandle as SnapshotHandle
from statecore.store._pool import SnapshotPool as SnapshotPool
from statecore.store._prefix_cache import PrefixCache as PrefixCache
from statecore.store._prefix_tree import Entry as Entry
from statecore.store._prefix_tree import PrefixTree as PrefixTree
from statecore.store._sizing import SlotPlan as SlotPlan
from statecore.store._sizing import draft_limit as draft_limit
from statecore.store._sizing import plan_bytes as plan_bytes
from statecore.store._sizing import pool_bytes as pool_bytes
from statecore.store._sizing import sequence_bytes as sequence_bytes
from statecore.store._sizing import verify_tiers as verify_tiers

__all__ = [
    "BlockStore", "CacheStats", "Entry", "Hit", "Lease", "PrefixCache", "PrefixTree",
    "SlotPlan", "SnapshotHandle", "SnapshotPool", "draft_limit", "plan_bytes", "pool_bytes",
    "sequence_bytes", "verify_tiers",
]  # fmt: skip

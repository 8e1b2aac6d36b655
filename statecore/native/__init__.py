"""States on values: estimate, capture and copy, exchange, budget."""

from statecore.native._budget import Reservation as Reservation
from statecore.native._budget import SnapshotBudget as SnapshotBudget
from statecore.native._budget import SnapshotLimits as SnapshotLimits
from statecore.native._budget import SnapshotUsage as SnapshotUsage
from statecore.native._capture import capture as capture
from statecore.native._capture import copy as copy
from statecore.native._estimate import Estimate as Estimate
from statecore.native._estimate import estimate as estimate
from statecore.native._estimate import estimate_growth as estimate_growth
from statecore.native._exchange import exchange as exchange

__all__ = [
    "Estimate", "Reservation", "SnapshotBudget", "SnapshotLimits", "SnapshotUsage",
    "capture", "copy", "estimate", "estimate_growth", "exchange",
]  # fmt: skip

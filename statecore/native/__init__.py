"""States on values: estimate, capture and copy, exchange, capacity, budget."""

from statecore.native._budget import Reservation as Reservation
from statecore.native._budget import SnapshotBudget as SnapshotBudget
from statecore.native._budget import SnapshotLimits as SnapshotLimits
from statecore.native._budget import SnapshotUsage as SnapshotUsage
from statecore.native._capture import capture as capture
from statecore.native._capture import copy as copy
from statecore.native._compact import bucket_rows as bucket_rows
from statecore.native._compact import cut_geometry as cut_geometry
from statecore.native._compact import grow as grow
from statecore.native._compact import resize as resize
from statecore.native._compact import row_extents as row_extents
from statecore.native._estimate import Estimate as Estimate
from statecore.native._estimate import PlaneBytes as PlaneBytes
from statecore.native._estimate import estimate as estimate
from statecore.native._exchange import exchange as exchange
from statecore.native._growth import count_inputs as count_inputs
from statecore.native._growth import estimate_growth as estimate_growth
from statecore.native._growth import logical_bytes as logical_bytes
from statecore.native._growth import measured_growth as measured_growth

__all__ = [
    "Estimate", "PlaneBytes", "Reservation", "SnapshotBudget", "SnapshotLimits", "SnapshotUsage",
    "bucket_rows", "capture", "copy", "count_inputs", "cut_geometry", "estimate", "estimate_growth",
    "exchange", "grow", "logical_bytes", "measured_growth", "resize", "row_extents",
]  # fmt: skip

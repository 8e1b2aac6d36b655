"""How a window is undone: by replaying its inputs, by keeping every step, or by running it again."""

import dataclasses
import math

from statecore._errors import BudgetError, GeometryError, UnsupportedError
from statecore.backend import Backend, checks
from statecore.state import Geometry

STRATEGIES = ("replay", "select", "rerun")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Which strategy a budget allows, and what each would keep for one window.

    strategy: the one to use.
    costs: bytes kept, by strategy; None for one that the backend cannot follow.
    """

    strategy: str
    costs: dict[str, int | None]

    @property
    def num_bytes(self) -> int:
        """Bytes that the chosen strategy keeps for one window."""
        kept = self.costs[self.strategy]
        assert kept is not None
        return kept


def choose_strategy(backend: Backend, strategy: str) -> str:
    """Returns the strategy to use; `auto` replays where the backend can.

    Raises:
      UnsupportedError: no such strategy, or the backend has no replay.
    """
    if strategy == "auto":
        return "replay" if backend.has_fast_verify else "select"
    if strategy not in STRATEGIES:
        raise UnsupportedError(f"strategy={strategy!r} is not one of auto, {', '.join(STRATEGIES)}.")
    if strategy == "replay" and not backend.has_fast_verify:
        raise UnsupportedError(
            f"strategy='replay' needs a backend with `verify` and `replay`, but {backend.name} has only `step`. "
            "Use 'select' or 'rerun'."
        )
    return strategy


def plan(geometry: Geometry, k: int, budget: int | None) -> Plan:
    """Returns the strategy for windows of `k` rows within `budget` bytes, the fastest that fits.

    Args:
      geometry: of the state; it knows what the backend's own trace takes.
      k: the window's width.
      budget: bytes that may be kept for one window; None for no limit.

    Raises:
      BudgetError: none fits; the message has the three costs.
      GeometryError: `k` or `budget` is not a whole number.
    """
    if not isinstance(geometry, Geometry):
        raise GeometryError(f"A plan is made for a geometry, but was given {geometry!r}.")
    checks.whole(k, "k", least=1)
    if budget is not None:
        checks.whole(budget, "budget")
    costs = {
        "replay": _replay_bytes(geometry, k),
        "select": _select_bytes(geometry, k),
        "rerun": _rerun_bytes(geometry, k),
    }
    for strategy in STRATEGIES:
        cost = costs[strategy]
        if cost is not None and (budget is None or cost <= budget):
            return Plan(strategy=strategy, costs=costs)
    listed = ", ".join(f"{name} {'impossible' if cost is None else f'{cost:,}'}" for name, cost in costs.items())
    raise BudgetError(f"No strategy keeps a window of {k} rows within {budget:,} bytes: {listed}.")


def _replay_bytes(geometry: Geometry, k: int) -> int | None:
    if geometry.trace_nbytes is None:
        return None
    fixed, per_row = geometry.trace_nbytes
    return fixed + k * per_row


def _select_bytes(geometry: Geometry, k: int) -> int | None:
    total = 0
    for plane in geometry.planes:
        times = {"shift": k, "recurrent": k, "opaque": 1}.get(plane.plane.kind, 0)
        if not times:
            continue
        if plane.nbytes is None:
            return None
        total += times * plane.nbytes
    return total


def _rerun_bytes(geometry: Geometry, k: int) -> int:
    return math.prod((geometry.batch, k, 4))  # int32 tokens

"""Points of the curve of step time against budget, from planning within several budgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CurvePoint:
    """The plan within one budget.

    Attributes:
        budget_bytes: device bytes, everything included.
        feasible: there is a plan; without one all that follows but `smallest_feasible_bytes` is 0 or empty.
        peak_bytes: predicted highest device bytes.
        step_time_s: predicted.
        slowdown: time of the step beyond keeping everything, as a fraction of the latter.
        recomputed_bytes: bytes of activations made more than once.
        offload_bytes, reload_bytes: offloaded and reloaded in one iteration.
        lower_tier_bytes: most bytes in the lower tier at any time of the iteration.
        wait_s: predicted time that computing waits for copies.
        smallest_feasible_bytes: the smallest budget for which planning found a plan.
        method, variant: as in `PlanSummary`.
        plan_hash: hash of the plan.
        planned_within_bytes: the budget that the plan was made for; a smaller one where that plan is faster than what
            was found for this budget.
        planned_in_s: seconds that planning took; 0 where equal input must give equal files.
    """

    budget_bytes: int
    feasible: bool
    peak_bytes: int = 0
    step_time_s: float = 0.0
    slowdown: float = 0.0
    recomputed_bytes: int = 0
    offload_bytes: int = 0
    reload_bytes: int = 0
    lower_tier_bytes: int = 0
    wait_s: float = 0.0
    smallest_feasible_bytes: int = 0
    method: str = ""
    variant: str = ""
    plan_hash: str = ""
    planned_within_bytes: int = 0
    planned_in_s: float = 0.0

    @property
    def borrowed(self) -> bool:
        """Say whether the plan was made for a smaller budget."""
        return self.feasible and self.planned_within_bytes < self.budget_bytes

    @property
    def traffic_bytes(self) -> int:
        """Return the bytes offloaded and reloaded together."""
        return self.offload_bytes + self.reload_bytes

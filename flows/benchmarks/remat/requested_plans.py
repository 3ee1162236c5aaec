"""Chooses which plans the rematerialization benchmark asks for.

They are for shares of an activation budget, for the smallest budget, and for the peaks that others were measured at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stowage.flows.benchmarks.child_process import Served
from stowage.flows.benchmarks.remat.names import AUTO
from stowage.stages.ir.errors import StowageError, size_text

Plan = dict[str, Any]
"""An answer of `plans.Planner`."""

CLOSE = 0.99
"""Share of a peak from which a plan with so much memory stands for a plan within the peak."""


@dataclass(frozen=True)
class Asked:
    """A method and its budget: a share of keep-all's activation budget, bytes, or (neither) its least budget."""

    method: str
    share: float | None = None
    budget_bytes: int | None = None

    @property
    def setting(self) -> str:
        """Return the budget as people read it."""
        if self.budget_bytes is not None:
            return f"in {size_text(self.budget_bytes)}"
        return "smallest" if self.share is None else f"{self.share:.0%}"


def peaks_to_match(peaks: Iterable[int], taken: Sequence[int], limit_bytes: int) -> list[int]:
    """Return the peaks that are worth a plan, smallest first.

    They are less than `limit_bytes`, a limit in bytes, and neither a plan in `taken` nor one for a peak chosen before
    takes
    nearly as much (`CLOSE`), and not more.
    """
    chosen: list[int] = []
    for peak in sorted(set(peaks)):
        if peak < limit_bytes and not any(CLOSE * peak <= other <= peak for other in (*taken, *chosen)):
            chosen.append(peak)
    return chosen


class Planners:
    """The process that plans a model, replaced by another one when an answer is late or it has ended."""

    def __init__(self, enter: Callable[[], Served]) -> None:
        """Start a process with `enter`."""
        self._enter = enter
        self._served = enter()
        self.about = self._served.about

    def close(self) -> None:
        """End the process."""
        self._served.close()

    def plans(self, methods: Sequence[str], shares: Sequence[float], peaks: Iterable[int]) -> dict[Asked, Plan]:
        """Plan with every method and share, and say what became of each.

        `AUTO` also plans for the budgets that others take: `peaks`, and those of the other methods' plans.
        """
        asked = [Asked(method, share) for method in methods for share in (*shares, None)]
        found = {one: self._plan(one) for one in asked}
        if AUTO in methods:
            taken = {one: plan["predicted_peak_bytes"] for one, plan in found.items() if "why" not in plan}
            ours = [peak for one, peak in taken.items() if one.method == AUTO]
            others = [peak for one, peak in taken.items() if one.method != AUTO]
            matched = peaks_to_match([*peaks, *others], ours, self.about["keep_all_peak_bytes"])
            found |= {one: self._plan(one) for one in (Asked(AUTO, budget_bytes=peak) for peak in matched)}
        return found

    def _plan(self, asked: Asked) -> Plan:
        try:
            plan: Plan = self._served.ask([asked.method, asked.share, asked.budget_bytes])
        except StowageError as error:
            self.close()
            self._served = self._enter()
            return {"budget": -1, "why": str(error)}
        return plan

"""Step time against budget: plans of one step, from one profile, from keeping everything to the least memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from stowage.flows.planning.costed import Costed
from stowage.flows.planning.curve_result import CardAnswer, Curve
from stowage.flows.planning.job import Planning
from stowage.flows.planning.sizes import everything_kept
from stowage.flows.planning.step import solve_costed
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.errors import NO_PLAN, Infeasible, NoRoomInLowerTier, ParameterError
from stowage.stages.ir.freezable import Freezable
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import Known, Solved, Sought, sought_budget
from stowage.stages.solve.curve import never_slower_with_more, point_of, spread_points
from stowage.stages.solve.goals import Kept, Solve, kept_of, least

POINTS = 12
"""The number of budgets of a curve where the caller names none."""

MOST_POINTS = 1000
"""The largest number of budgets of one curve."""


class CurvePlanner:
    """Plans one step within any budget, as `fit` does, and makes once what all budgets share."""

    def __init__(self, costed: Costed, how: Planning, known: Known | None = None) -> None:
        """Take a step that is traced, profiled and cut.

        Args:
            costed: the step.
            how: with which method and effort it is planned.
            known: see `solve_costed`.
        """
        self.costed = costed
        self.how = how
        self._known = known if known is not None else Known()
        self._found: dict[int, Solved | Infeasible | NoRoomInLowerTier] = {}
        self._seconds: dict[int, float] = {}

    @cached_property
    def kept(self) -> Kept:
        """Return the step as it was recorded, with everything kept."""
        return kept_of(self.costed.variants[0], self.reserve, self._freezable)

    @cached_property
    def _freezable(self) -> Freezable | None:
        return self.how.freeze.freezable(self.costed.variants[0].trace) if self.how.freeze is not None else None

    def solve(self, budget_bytes: int) -> Solved:
        """Return the plan within a budget; each is found once.

        Raises:
            Infeasible: there is none.
            NoRoomInLowerTier: there would be one, if the lower tier had more room.
        """
        if budget_bytes not in self._found:
            started = time.perf_counter()
            try:
                self._found[budget_bytes] = self._everything(budget_bytes) or self._solved(budget_bytes)
            except NO_PLAN as error:
                self._found[budget_bytes] = error
            self._seconds[budget_bytes] = time.perf_counter() - started
        found = self._found[budget_bytes]
        if not isinstance(found, Solved):
            raise found
        return found

    def _solved(self, budget_bytes: int) -> Solved:
        solved, _ = solve_costed(self.costed, budget_bytes, self.how, known=self._known)
        return solved

    @cached_property
    def _quick(self) -> Solve | None:
        """Return what finds plans with a lower tier by rules alone; without one nothing is quicker than `solve`.

        O-ILP takes seconds to minutes, and the least memory is found without: rules offload all they can.
        """
        if self.how.lower_tier is None:
            return None
        by_rules = replace(self.how, effort=replace(self.how.effort, o_ilp_searches=0))
        return lambda budget_bytes: solve_costed(self.costed, budget_bytes, by_rules, known=self._known)[0]

    def _everything(self, budget_bytes: int) -> Solved | None:
        """Return the plan that keeps everything, where that fits."""
        if budget_bytes < self.kept.nbytes:
            return None
        request = self.how.request(budget_bytes - self.reserve(budget_bytes), self.costed.target)
        found = everything_kept(self.costed.variants[0], request, self._freezable)
        return found.solved if found is not None else None

    def reserve(self, budget_bytes: int) -> int:
        """Return the bytes of a budget that no plan may take."""
        return self.costed.target.reserve_bytes(budget_bytes, len(self.costed.variants[0].trace.storages))

    def sought(self, asked: str) -> Sought:
        """Return the budget that `smallest` or `+5%` stands for."""
        return sought_budget(asked, self.solve, self.kept, self._quick)

    def fastest(self, budget_bytes: int) -> Solved:
        """Return the fastest plan within a budget among those found: its own, or one for a smaller budget.

        Raises:
            Infeasible: there is none.
            NoRoomInLowerTier: there would be one, if the lower tier had more room.
        """
        with suppress(*NO_PLAN):
            self.solve(budget_bytes)
        found = [s for b, s in self._found.items() if b <= budget_bytes and isinstance(s, Solved)]
        return min(found, key=lambda s: s.summary.step_time_s) if found else self.solve(budget_bytes)

    def point(self, budget_bytes: int) -> CurvePoint:
        """Return the plan within a budget as a row, with the time that finding it took."""
        found = point_of(budget_bytes, self.solve, self.kept, self.reserve)
        return replace(found, planned_in_s=self._seconds[budget_bytes])

    def curve(
        self,
        budgets: int | Sequence[str | int] = POINTS,
        said: Callable[[CurvePoint], None] = lambda point: None,
        answer: Callable[[], CardAnswer] | None = None,
        room_bytes: int = 0,
    ) -> Curve:
        """Plan the curve from keeping everything to the least memory.

        Args:
            budgets: how many, closest together where the step time changes most; or which: sizes, or percentages of
                plain PyTorch's peak.
            said: called with each point as it is found. What the curve returns may be faster, where a plan for a
                smaller budget is.
            answer: makes the answer whether the step fits, for a card that is only described, once all plans are found.
            room_bytes: what a card has room for: a row too, where it is between and only the number of rows is given.

        Raises:
            ParameterError: a budget is not a size, or there are too many.
            Infeasible: no budget has a plan.
        """
        listed = self._listed(budgets)
        smallest = least(self.solve, self._quick)

        def point(budget: int) -> CurvePoint:
            found = self.point(budget)
            said(found)
            return found

        if listed:
            points = [point(budget) for budget in listed]
        else:
            points = spread_points(int(str(budgets)), smallest, max(self.kept.nbytes, smallest), point)
            if smallest < room_bytes < self.kept.nbytes:
                points.append(point(room_bytes))
        shown = {p.budget_bytes for p in points}
        points = [p for p in never_slower_with_more(map(self.point, self._found)) if p.budget_bytes in shown]
        smallest = min([smallest, *(p.budget_bytes for p in points if p.feasible)])
        points = [p if p.feasible else replace(p, smallest_feasible_bytes=smallest) for p in points]
        return Curve(
            model=self.costed.variants[0].trace.meta.model,
            device=self.costed.target.name,
            plain_peak_bytes=self.costed.eager_peak_bytes,
            keep_all_bytes=self.kept.nbytes,
            keep_all_peak_bytes=self.kept.nbytes - self.reserve(self.kept.nbytes),
            keep_all_time_s=self.kept.time_s,
            smallest_bytes=smallest,
            estimated=any(n.estimated for n in self.costed.variants[0].nodes),
            points=tuple(points),
            answer=answer() if answer is not None else None,
        )

    def _listed(self, budgets: int | Sequence[str | int]) -> list[int]:
        """Return the budgets in bytes, the largest first, each once; none where only their number is given."""
        if isinstance(budgets, int) and not isinstance(budgets, bool) and 2 <= budgets <= MOST_POINTS:
            return []
        if isinstance(budgets, int | str) or not 1 <= len(budgets) <= MOST_POINTS:
            raise ParameterError(f"budgets is {budgets!r}: give how many, 2 to {MOST_POINTS}, or a list of sizes.")
        return sorted({resolve_budget(b, self.costed.eager_peak_bytes, "budgets") for b in budgets}, reverse=True)

"""Solves H-ILP for a list of budgets and reads its schedules (thesis 3.4); the model is in `model.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from stowage.stages.formulations.cluster.answer import Budgets, HAnswer, answer_of, no_answer
from stowage.stages.formulations.cluster.h_ilp.equations import build
from stowage.stages.formulations.cluster.h_ilp.model import HIlp
from stowage.stages.formulations.cluster.policies import Incumbent, Incumbents, settled
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.staged_order import ClusterExecution, HRuns, cost_of, timeline
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.solver.milp import MilpSolver, solve_milp
from stowage.stages.solver.outcome import SolverSettings


def h_ilp(
    graph: HGraph,
    budgets: Sequence[Budgets],
    settings: SolverSettings,
    *,
    corrections: bool = True,
    solver: MilpSolver = "highs",
) -> list[HAnswer]:
    """Find the fastest schedule within each pair of budgets, over the staged order.

    Args:
        graph: the graph to schedule.
        budgets: pairs (M_peak, M_save), bytes; see `problem`.
        settings: limits of each solve.
        corrections: count memory step by step (3.34) instead of as if everything were in memory all the time (3.33).
        solver: "highs" or "cbc".

    Returns:
        An answer for each pair, in order. Each solve starts from the fastest known schedule that fits: a policy's,
        RK-Rotor's (`policies`) or an earlier answer's; where nothing is found within the limit, that schedule is the
        answer, with status "heuristic".

    Raises:
        ValueError: the graph is no H-Graph.
    """
    solver_ = HIlpSolver(graph, settings, corrections=corrections, solver=solver)
    known, answers = list[HRuns](), list[HAnswer]()
    for pair in budgets:
        answer = solver_.asked(pair, next(iter(solver_.incumbents.within(*pair, known)), None))
        if answer.runs is not None:
            known.append(answer.runs)
        answers.append(answer)
    return answers


class HIlpSolver:
    """Solves `h_ilp` for one pair of budgets, using what is known of others."""

    def __init__(
        self,
        graph: HGraph,
        settings: SolverSettings,
        *,
        corrections: bool = True,
        solver: MilpSolver = "highs",
    ) -> None:
        graph.check()
        self.data = HProblem(graph)
        self.settings, self._corrections, self._solver = settings, corrections, solver
        self.incumbents = Incumbents(self.data)

    def solve(self, budgets: Budgets, known: Sequence[HAnswer] = ()) -> HAnswer:
        """Solve one pair of budgets, given the answers for others; where these settle it, the solver is not called."""
        runs = [answer.runs for answer in known if answer.runs is not None]
        hint = next(iter(self.incumbents.within(*budgets, runs)), None)
        return settled(self.data, budgets, hint, known, self.settings.gap) or self.asked(budgets, hint)

    def asked(self, budgets: Budgets, hint: Incumbent | None) -> HAnswer:
        """Call the solver, starting from the hint."""
        return _solve(self.data, budgets, self.settings, self._corrections, self._solver, hint)

    def smallest_peak(self) -> tuple[HRuns, int]:
        """Find executions with nearly the least M_peak (within the limits of the settings), and that peak."""
        data = self.data
        least = min(self.incumbents.smallest(), key=lambda c: (c.cost.peak_bytes, c.cost.time_s))
        no_limit = sum(data.nbytes) + least.cost.peak_bytes
        model = build(data, least.cost.peak_bytes, no_limit, corrections=self._corrections, minimise="peak")
        warm_start(model, least.runs)
        outcome = solve_milp(model.problem, self.settings, solver=self._solver, warm_start=True)
        if outcome.found:
            runs = read_runs(model)
            cost = cost_of(data, timeline(data, runs))
            if cost.peak_bytes < least.cost.peak_bytes:
                return runs, cost.peak_bytes
        return least.runs, least.cost.peak_bytes


def _solve(
    data: HProblem,
    budgets: Budgets,
    settings: SolverSettings,
    corrections: bool,
    solver: MilpSolver,
    hint: Incumbent | None,
) -> HAnswer:
    model = build(data, *budgets, corrections=corrections)
    if hint is not None:
        warm_start(model, hint.runs)
    outcome = solve_milp(model.problem, settings, solver=solver, warm_start=hint is not None)
    if outcome.found:
        status: Literal["optimal", "feasible"] = "optimal" if outcome.status == "optimal" else "feasible"
        return answer_of(data, budgets, read_runs(model), status, max(outcome.bound, data.floor_s), "h_ilp")
    if hint is not None:
        # In memory units, or without corrections, the hint may not fit; counted in bytes it does.
        return answer_of(data, budgets, hint.runs, "heuristic", data.floor_s, hint.name)
    return no_answer(budgets, False if outcome.status == "infeasible" else None, outcome.bound, "h_ilp")


def read_runs(model: HIlp) -> HRuns:
    """Read the executions from Comp; when each copy is freed follows from them (`staged_order`)."""
    return {
        k: [
            ClusterExecution(t, way.option)
            for t in range(k, model.T)
            for w, way in enumerate(model.data.ways[k])
            if (model.Comp[t, k, w].varValue or 0.0) > 0.5
        ]
        for k in range(model.T)
    }


def warm_start(model: HIlp, runs: HRuns) -> None:
    """Give every variable its value in the schedule of these executions."""
    data, events = model.data, timeline(model.data, runs)
    for variable in model.problem.variables():
        variable.setInitialValue(0)
    if model.minimise == "peak":
        model.limit.setInitialValue(model.peak)
    values: dict[int, set[int]] = {}
    phantoms: dict[int, int] = {}
    used, position = 0, 0
    for t in range(model.T):
        _set_saved(model, t, values, phantoms)
        for k in range(t + 1):
            if position < len(events) and (events[position].stage, events[position].node) == (t, k):
                event = events[position]
                position += 1
                model.Comp[t, k, data.ways[k].index(event.way)].setInitialValue(1)
                for d in event.made:
                    model.C[t, k, d].setInitialValue(1)
                for d in data.graph.nodes[k].makes:
                    values.setdefault(d, set()).add(k)
                for d in event.freed:
                    model.D[t, k, d].setInitialValue(1)
                    del values[d]
                if event.way.option is not None:
                    j = data.cluster_of[k]
                    phantoms[j] = event.way.option
                    if event.drops_phantom:
                        del phantoms[j]
                used = sum(model.size(d) for d in values) + sum(model.phantom(j, o) for j, o in phantoms.items())
            model.U[t, k].setInitialValue(used)
    _set_saved(model, model.T, values, phantoms)


def _set_saved(model: HIlp, t: int, values: dict[int, set[int]], phantoms: dict[int, int]) -> None:
    for d, contributors in values.items():
        model.P[t, d].setInitialValue(1)
        for k in contributors:
            model.S[t, k, d].setInitialValue(1)
    for j, o in phantoms.items():
        model.Sp[t, j, o].setInitialValue(1)

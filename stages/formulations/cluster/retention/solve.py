"""Solves H-ILP's problem as retention intervals on CP-SAT; the model is in `model.py`, budgets in `memory.py`."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.formulations.block.staged_order import units
from stowage.stages.formulations.cluster.answer import Budgets, HAnswer, answer_of, no_answer
from stowage.stages.formulations.cluster.policies import Incumbent, Incumbents, settled
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.retention.lines import add_lines
from stowage.stages.formulations.cluster.retention.memory import add_peak, add_save
from stowage.stages.formulations.cluster.retention.model import HRetentionModel, total_time
from stowage.stages.formulations.cluster.staged_order import ClusterExecution, HRuns, cost_of, timeline
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.solver.cp import CpAnswer, solve_cp
from stowage.stages.solver.outcome import SolverSettings


def h_retention(
    graph: HGraph,
    budgets: Sequence[Budgets],
    settings: SolverSettings,
    *,
    computations: int = 2,
    recompute_backward: bool = False,
) -> list[HAnswer]:
    """Find the fastest schedule within each pair of budgets, with at most `computations` of each node.

    Args:
        graph: the graph to schedule.
        budgets: pairs (M_peak, M_save), bytes; see `problem`.
        settings: limits of each solve.
        computations: C, the most runs of a node.
        recompute_backward: nodes after the loss that belong to no cluster may run again too.

    Returns:
        An answer for each pair, in order; bounds and "infeasible" hold under the model's restrictions. Each solve
        starts from the fastest known schedule that fits. A policy that runs a node more often than C, and is faster
        than what the model finds, is the answer, with status "heuristic".

    Raises:
        ValueError: the graph is no H-Graph.
    """
    solver = HRetention(graph, settings, computations=computations, recompute_backward=recompute_backward)
    found: list[HAnswer] = []
    for pair in budgets:
        found.append(solver.solve(pair, found))
    return found


class HRetention:
    """Solves `h_retention` for one pair of budgets, using what is known of others."""

    def __init__(
        self,
        graph: HGraph,
        settings: SolverSettings,
        *,
        computations: int = 2,
        recompute_backward: bool = False,
    ) -> None:
        graph.check()
        self.data = HProblem(graph)
        self.settings, self.computations, self.recompute_backward = settings, computations, recompute_backward
        self.incumbents = Incumbents(self.data)

    def solve(self, budgets: Budgets, known: Sequence[HAnswer] = ()) -> HAnswer:
        """Solve one pair of budgets like `h_retention`, given the answers for others."""
        runs = [answer.runs for answer in known if answer.runs is not None]
        fitting = self.incumbents.within(*budgets, runs)
        hint = fitting[0] if fitting else None
        return settled(self.data, budgets, hint, known, self.settings.gap) or self._solve(budgets, fitting)

    def smallest_peak(self) -> tuple[HRuns, int]:
        """Find executions with (nearly) the least M_peak, and that peak; calls the function of the same name."""
        return smallest_peak(self.incumbents, self.settings)

    def _solve(self, budgets: Budgets, fitting: Sequence[Incumbent]) -> HAnswer:
        model = HRetentionModel.of(self.data, budgets, self.computations, recompute_backward=self.recompute_backward)
        add_peak(model, budgets[0] // model.unit)
        add_save(model, budgets[1] // model.unit)
        add_lines(model, budgets[0] // model.unit)
        model.cp.minimize(total_time(model))
        # The fastest schedule may run a node more often than the model can express.
        hint = next((one for one in fitting if _fits(model, one.runs)), None)
        if hint is not None:
            add_hint(model, hint.runs)
        answer = solve_cp(model.cp, self.settings, linear=True)
        outcome = answer.outcome
        bound_s = max(self.data.floor_s, outcome.bound * model.time_unit if outcome.status != "infeasible" else 0.0)
        best = fitting[0] if fitting else None
        known = None if best is None else answer_of(self.data, budgets, best.runs, "heuristic", bound_s, best.name)
        if not outcome.found:
            feasible = False if outcome.status == "infeasible" else None
            return known or no_answer(budgets, feasible, bound_s, "h_retention")
        optimal = outcome.status == "optimal"
        if optimal and not self.settings.gap:
            # Times were rounded down, so the objective itself is the bound.
            bound_s = float("inf")
        runs = read_runs(model, answer)
        found = answer_of(self.data, budgets, runs, "optimal" if optimal else "feasible", bound_s, "h_retention")
        if known and known.report and found.report and known.report.objective_s < found.report.objective_s:
            return known
        return found


def smallest_peak(incumbents: Incumbents, settings: SolverSettings, *, computations: int = 2) -> tuple[HRuns, int]:
    """Find executions with (nearly, within the limits of `settings`) the least M_peak, however slow, and that peak."""
    data, known = incumbents.data, sorted(incumbents.smallest(), key=lambda c: (c.cost.peak_bytes, c.cost.time_s))
    least = known[0]
    model = HRetentionModel.of(data, (), computations, recompute_backward=False)
    hint = next(c for c in known if _fits(model, c.runs))
    before = units(hint.cost.peak_bytes, model.unit)
    peak = model.cp.new_int_var(0, before, "peak")
    add_peak(model, peak)
    model.cp.minimize(peak)
    model.cp.add_hint(peak, before)
    add_hint(model, hint.runs)
    answer = solve_cp(model.cp, settings)
    if answer.outcome.found:
        runs = read_runs(model, answer)
        cost = cost_of(data, timeline(data, runs))
        if cost.peak_bytes < least.cost.peak_bytes:
            return runs, cost.peak_bytes
    return least.runs, least.cost.peak_bytes


def read_runs(model: HRetentionModel, answer: CpAnswer) -> HRuns:
    """Read the executions from the variables."""
    found: dict[int, list[ClusterExecution]] = {k: [] for k in range(model.data.size)}
    for (k, m, w), chosen in model.ways.items():
        if answer.value(chosen):
            found[k].append(ClusterExecution(answer.value(model.runs[k][m].stage), model.data.ways[k][w].option))
    return {k: sorted(runs, key=lambda run: run.stage) for k, runs in found.items()}


def _fits(model: HRetentionModel, runs: HRuns) -> bool:
    """Say whether the model can express these executions."""
    return all(len(runs[k]) <= len(model.runs[k]) for k in model.runs)


def add_hint(model: HRetentionModel, runs: HRuns) -> None:
    """Give the solver a whole schedule to start from."""
    cp, data = model.cp, model.data
    for k, places in model.runs.items():
        for m, run in enumerate(places):
            there = m < len(runs[k])
            if run.present is not None:
                cp.add_hint(run.present, int(there))
                cp.add_hint(run.stage, runs[k][m].stage if there else k + m)
            if k in data.forward_of:
                for w, way in enumerate(data.ways[k]):
                    cp.add_hint(model.ways[k, m, w], int(there and runs[k][m].option == way.option))
    for cluster in data.graph.clusters:
        if len(model.runs[cluster.forward]) > 1:
            for o in range(len(cluster.options)):
                cp.add_hint(model.ways[cluster.backward, 0, o], int(runs[cluster.backward][0].option == o))
    ends = _ends(model, runs)
    for (g, m), end in model.ends.items():
        k = model.groups[g].contributors[0]
        cp.add_hint(end, ends.get((g, m), (k + m) * model.slots + model.offset[k] + model.width[k]))
    for (g, m), start in model.starts.items():
        k = model.groups[g].contributors[0]
        stage, birth = k + m, 0
        if m < len(runs[k]):
            execution = runs[k][m]
            way = next(way for way in data.ways[k] if way.option == execution.option)
            stage, birth = execution.stage, way.birth(model.groups[g].value)
        cp.add_hint(start, stage * model.slots + model.offset[k] + birth)
    for (r, j, k, m), y in model.reads.items():
        if r == data.size:
            served: int | None = len(runs[k]) - 1
        else:
            served = _serving(runs, k, runs[r][j].stage) if j < len(runs[r]) else None
        cp.add_hint(y, int(served == m))
    for (k, m), later in model.later.items():
        cp.add_hint(later, int((runs[k][m].stage if m < len(runs[k]) else k + m) > data.graph.loss))


def _serving(runs: HRuns, k: int, stage: int) -> int:
    return max(m for m, run in enumerate(runs[k]) if run.stage <= stage)


def _ends(model: HRetentionModel, runs: HRuns) -> dict[tuple[int, int], int]:
    """Return the slots at which copies are freed when they last only as long as they are needed."""
    data, found = model.data, dict[tuple[int, int], int]()
    for g, group in enumerate(model.groups):
        shared, d = len(group.contributors) > 1, group.value
        for r in sorted({*group.contributors, *group.readers}):
            for j, run in enumerate(runs[r]):
                way = next(way for way in data.ways[r] if way.option == run.option)
                if r in group.contributors:
                    m = 0 if shared else j
                elif d in way.reads:
                    m = 0 if shared else _serving(runs, group.contributors[0], run.stage)
                else:
                    continue
                end = run.stage * model.slots + model.offset[r] + way.death(d)
                found[g, m] = max(found.get((g, m), 0), end)
        if group.final:
            found[g, 0 if shared else len(runs[group.contributors[0]]) - 1] = model.horizon
    return found

"""Retention intervals (Moccasin; Bartan et al. 2023) on CP-SAT, over the staged order of `staged_order`.

| symbol | variable | unit |
|---|---|---|
| x[k,m] | node k is computed an m-th time (m = 0 always is) | – |
| s[k,m] | stage of that computation; s[k,0] = k | stage |
| E[k,m] | its event: s[k,m] · T + k, so that events ascend as the staged order does | event |
| e[g,m] | event at which the copy of allocations g made by it is freed | event |
| y[r,j,k,m] | the j-th computation of r reads what the m-th computation of k made | – |
| save[g] | allocations g are in memory at the loss | – |
| M_peak, M_save | budgets as in RK-Checkmate | memory unit, rounded down |
| C | computations a node at most (2 finds all that RK-Checkmate finds unless it computes something three times) | – |

A copy occupies memory during [E[k,m], e[g,m]); `cumulative` keeps the sum within M_peak at every event. Allocations of
one node with the same readers are made and freed together and form one group g.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stowage.stages.formulations.block.staged_order import (
    Executions,
    StagedGraph,
    cost_of,
    memory_unit,
    run_once,
    schedule_of,
    timeline,
    units,
)
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.solver.cp import CpAnswer, cp_model, solve_cp
from stowage.stages.solver.outcome import SolverSettings

_TIME_STEPS = 10_000_000
_LARGEST_MEMORY = 1 << 40


@dataclass(frozen=True)
class Group:
    """Allocations of one node with the same readers and the same role at the border of the block."""

    creator: int
    nbytes: int
    readers: tuple[int, ...]
    outgoing: bool
    output: bool


@dataclass(frozen=True)
class Computation:
    """The m-th computation of a node: presence literal (None: always), stage, event."""

    present: Any
    stage: Any
    event: Any


@dataclass
class _Model:
    graph: StagedGraph
    unit: int
    time_unit: float
    cp: Any = field(default_factory=lambda: cp_model.CpModel())
    runs: dict[int, list[Computation]] = field(default_factory=dict)
    reads: dict[tuple[int, int, int, int], Any] = field(default_factory=dict)
    ends: dict[tuple[int, int], Any] = field(default_factory=dict)
    saved: dict[tuple[int, int], Any] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Return the number of nodes, the loss node included."""
        return len(self.graph.nodes)

    @property
    def horizon(self) -> int:
        """Return the number of events."""
        return self.size * self.size


def retention(
    block: BlockGraph,
    peak_bytes: int,
    save_bytes: int,
    settings: SolverSettings,
    *,
    computations: int = 2,
    recompute_backward: bool = True,
    hint: Executions | None = None,
) -> tuple[BlockSchedule | None, SolveReport | None]:
    """Find the fastest schedule of `block` within both budgets with at most `computations` of each node.

    Args:
        block: graph to schedule.
        peak_bytes: M_peak, bytes in memory at any moment of forward or backward (see `ir.block` for what counts).
        save_bytes: M_save, bytes between forward and backward, output included, incoming gradient not.
        settings: limits of the solver.
        computations: C, the most computations of a node.
        recompute_backward: also consider computing backward nodes again; without it the report's bound holds only for
            schedules that do not.
        hint: executions of a nearly good schedule, to start from.

    Returns:
        Schedule and report; `(None, None)` where there is provably no schedule; `(None, report)` with status
        "feasible" and no objective where the limit came first.
    """
    executions, report = solve_executions(
        block,
        peak_bytes,
        save_bytes,
        settings,
        computations=computations,
        recompute_backward=recompute_backward,
        hint=hint,
    )
    if executions is None:
        return None, report
    staged = StagedGraph.of(block)
    return schedule_of(staged, timeline(staged, executions)), report


def solve_executions(
    block: BlockGraph,
    peak_bytes: int,
    save_bytes: int,
    settings: SolverSettings,
    *,
    computations: int = 2,
    recompute_backward: bool = True,
    hint: Executions | None = None,
) -> tuple[Executions | None, SolveReport | None]:
    """Solve like `retention`, but return executions, which can be the hint of the next solve."""
    model = _model(block, (peak_bytes, save_bytes), computations, recompute_backward)
    _memory(model, peak_bytes // model.unit)
    _memory_at_loss(model, save_bytes // model.unit)
    model.cp.minimize(_time(model))
    if hint is not None:
        _hint(model, hint)
    graph = model.graph
    answer = solve_cp(model.cp, settings)
    outcome = answer.outcome
    bound_s = outcome.bound * model.time_unit
    if outcome.status == "infeasible":
        return None, None
    if not outcome.found:
        return None, SolveReport.of_solver("retention", "feasible", float("inf"), bound_s)
    executions = _executions(model, answer)
    objective_s = cost_of(graph, timeline(graph, executions)).time_s
    bound_s = objective_s if outcome.status == "optimal" else bound_s  # the solver's is in rounded units of time
    return executions, SolveReport.of_solver("retention", outcome.status, objective_s, bound_s)


def smallest_peak(
    block: BlockGraph, settings: SolverSettings, *, computations: int = 2, hint: Executions | None = None
) -> tuple[Executions, int]:
    """Find executions with (nearly, within the limits of `settings`) the least M_peak, however slow, and that peak.

    Backward nodes run once. The thesis has no way to find this number (2.6.0.0.1).
    """
    model = _model(block, (), computations, recompute_backward=False)
    graph = model.graph
    plain = hint or run_once(graph)
    before = cost_of(graph, timeline(graph, plain)).peak_bytes
    peak = model.cp.new_int_var(0, units(before, model.unit), "peak")
    _memory(model, peak)
    model.cp.minimize(peak)
    model.cp.add_hint(peak, units(before, model.unit))
    _hint(model, plain)
    answer = solve_cp(model.cp, settings)
    if not answer.outcome.found:
        return plain, before
    executions = _executions(model, answer)
    return executions, cost_of(graph, timeline(graph, executions)).peak_bytes


def _model(block: BlockGraph, budgets: Iterable[int], computations: int, recompute_backward: bool) -> _Model:
    graph = StagedGraph.of(block)
    total_s = sum(node.time_s for node in graph.nodes)
    model = _Model(graph, memory_unit(graph, budgets, _LARGEST_MEMORY), total_s / _TIME_STEPS or 1.0)
    model.groups = group_allocations(graph)
    _computations(model, computations, recompute_backward)
    _reads(model)
    return model


def group_allocations(graph: StagedGraph) -> list[Group]:
    """Merge allocations that are made and freed together."""
    border_out, border_end = set(graph.block.output), set(graph.block.outgoing)
    sizes: dict[tuple[int, tuple[int, ...], bool, bool], int] = {}
    for k, node in enumerate(graph.nodes):
        for a in node.creates:
            key = (k, graph.readers[a], a in border_end, a in border_out)
            sizes[key] = sizes.get(key, 0) + graph.nbytes[a]
    return [Group(k, size, readers, end, out) for (k, readers, end, out), size in sizes.items()]


def _computations(model: _Model, most: int, recompute_backward: bool) -> None:
    """Add variables x, s and E; later computations are in later stages, and only exist if earlier ones do."""
    cp, T = model.cp, model.size
    for k, node in enumerate(model.graph.nodes):
        model.runs[k] = [Computation(None, k, k * T + k)]
        if node.once or (k > model.graph.loss and not recompute_backward):
            continue
        for m in range(1, most):
            if k + m >= T:
                break
            present = cp.new_bool_var(f"x[{k},{m}]")
            stage = cp.new_int_var(k + m, T - 1, f"s[{k},{m}]")
            before = model.runs[k][-1]
            if m > 1:
                cp.add_implication(present, before.present)
                cp.add(stage >= before.stage + 1).only_enforce_if(present)
            # An absent computation has one stage only, or equal answers would multiply.
            cp.add(stage == k + m).only_enforce_if(~present)
            model.runs[k].append(Computation(present, stage, stage * T + k))


def _reads(model: _Model) -> None:
    """Add variables e and y: every computation reads copies that are in memory, and copies last until they are read."""
    cp, T = model.cp, model.size
    of_node: dict[int, list[int]] = {}
    for g, group in enumerate(model.groups):
        of_node.setdefault(group.creator, []).append(g)
        for m, run in enumerate(model.runs[group.creator]):
            model.ends[g, m] = cp.new_int_var(group.creator * T + group.creator + 1, model.horizon, f"e[{g},{m}]")
            cp.add(model.ends[g, m] >= run.event + 1)
    for k, groups in of_node.items():
        runs = model.runs[k]
        for m in range(1, len(runs)):
            for g in groups:
                cp.add(model.ends[g, m - 1] <= runs[m].event).only_enforce_if(runs[m].present)
        for r in sorted({r for g in groups for r in model.groups[g].readers}):
            touched = [g for g in groups if r in model.groups[g].readers]
            for j, reader in enumerate(model.runs[r]):
                _one_copy(model, k, (r, j), reader, touched)
        last = Computation(None, T, model.horizon - 1)
        ending = [g for g in groups if model.groups[g].outgoing]
        if ending:
            _one_copy(model, k, (T, 0), last, ending)


def _one_copy(model: _Model, k: int, reader_key: tuple[int, int], reader: Computation, groups: list[int]) -> None:
    """Serve the reader's computation by exactly one computation of k, whose copy is in memory at that event."""
    cp, runs = model.cp, model.runs[k]
    if len(runs) == 1:
        for g in groups:
            served = cp.add(model.ends[g, 0] >= reader.event + 1)
            if reader.present is not None:
                served.only_enforce_if(reader.present)
        return
    choices = []
    for m, run in enumerate(runs):
        y = cp.new_bool_var(f"y[{reader_key},{k},{m}]")
        model.reads[(*reader_key, k, m)] = y
        choices.append(y)
        for g in groups:
            cp.add(model.ends[g, m] >= reader.event + 1).only_enforce_if(y)
        if run.present is not None:
            cp.add_implication(y, run.present)
            # The staged order lets k feed r within one stage because k < r.
            cp.add(run.stage <= reader.stage).only_enforce_if(y)
    if reader.present is None:
        cp.add_exactly_one(choices)
    else:
        cp.add(sum(choices) == reader.present)


def _memory(model: _Model, peak: Any) -> None:
    """Keep copies and workspace within M_peak at every event."""
    cp, intervals, demands = model.cp, [], []
    for (g, m), end in sorted(model.ends.items()):
        group = model.groups[g]
        run = model.runs[group.creator][m]
        if group.nbytes:
            size = cp.new_int_var(1, model.horizon, f"d[{g},{m}]")
            intervals.append(_interval(cp, run, size, end, f"copy[{g},{m}]"))
            demands.append(units(group.nbytes, model.unit))
    for k, node in enumerate(model.graph.nodes):
        if node.workspace_bytes:
            for m, run in enumerate(model.runs[k]):
                intervals.append(_interval(cp, run, 1, run.event + 1, f"work[{k},{m}]"))
                demands.append(units(node.workspace_bytes, model.unit))
    cp.add_cumulative(intervals, demands, peak)


def _interval(cp: Any, run: Computation, size: Any, end: Any, name: str) -> Any:
    if run.present is None:
        return cp.new_interval_var(run.event, size, end, name)
    return cp.new_optional_interval_var(run.event, size, end, run.present, name)


def _memory_at_loss(model: _Model, save: int) -> None:
    """Keep the memory at the loss, without the incoming gradient, within M_save."""
    cp, graph = model.cp, model.graph
    event = graph.loss * model.size + graph.loss
    terms = []
    for g, group in enumerate(model.groups):
        if group.creator >= graph.loss or not group.nbytes:
            continue
        saved_at_loss = cp.new_bool_var(f"save[{g}]")
        for m, run in enumerate(model.runs[group.creator]):
            released, later = cp.new_bool_var(f"released[{g},{m}]"), None
            cp.add(model.ends[g, m] <= event).only_enforce_if(released)
            if run.present is None:
                cp.add_bool_or(saved_at_loss, released)
                continue
            later = cp.new_bool_var(f"later[{g},{m}]")
            cp.add(run.stage > graph.loss).only_enforce_if(later)
            cp.add_bool_or(saved_at_loss, released, later, ~run.present)
        model.saved[g, 0] = saved_at_loss
        terms.append(units(group.nbytes, model.unit) * saved_at_loss)
    cp.add(sum(terms) <= save)


def _time(model: _Model) -> Any:
    """Return the total compute time, rounded down per node, so that the bound stays a bound."""
    terms: list[Any] = []
    for k, node in enumerate(model.graph.nodes):
        cost = int(node.time_s / model.time_unit)
        terms.append(cost)
        terms.extend(cost * run.present for run in model.runs[k][1:])
    return sum(terms)


def _executions(model: _Model, answer: CpAnswer) -> Executions:
    return {
        k: [answer.value(run.stage) for run in runs if run.present is None or answer.value(run.present)]
        for k, runs in model.runs.items()
    }


def _hint(model: _Model, executions: Executions) -> None:
    """Give the solver a whole schedule to start from."""
    cp, T = model.cp, model.size
    stages = {k: list(executions[k])[: len(model.runs[k])] for k in range(T)}
    for k, runs in model.runs.items():
        for m, run in enumerate(runs[1:], start=1):
            there = m < len(stages[k])
            cp.add_hint(run.present, int(there))
            cp.add_hint(run.stage, stages[k][m] if there else k + m)
    ends = _last_uses(model, stages)
    for (g, m), end in model.ends.items():
        k = model.groups[g].creator
        absent = k * T + k + 1 if m >= len(stages[k]) else stages[k][m] * T + k + 1
        cp.add_hint(end, max(ends.get((g, m), absent), absent))
    for (r, j, k, m), y in model.reads.items():
        if r == T:
            served: int | None = len(stages[k]) - 1
        else:
            served = _serving(stages[k], stages[r][j]) if j < len(stages[r]) else None
        cp.add_hint(y, int(served == m))


def _serving(stages: list[int], reader_stage: int) -> int:
    return max(m for m, stage in enumerate(stages) if stage <= reader_stage)


def _last_uses(model: _Model, stages: dict[int, list[int]]) -> dict[tuple[int, int], int]:
    T, found = model.size, dict[tuple[int, int], int]()
    for g, group in enumerate(model.groups):
        for r, t in ((reader, stage) for reader in group.readers for stage in stages[reader]):
            key = (g, _serving(stages[group.creator], t))
            found[key] = max(found.get(key, 0), t * T + r + 1)
        if group.outgoing:
            found[g, len(stages[group.creator]) - 1] = model.horizon
    return found

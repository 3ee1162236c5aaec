"""The independent pieces of work of one block's options.

The division of the work does not depend on the number of workers, so neither do the options.

- `grid`: fixed policies, the greedy family, frontiers, and the smallest peak found; from it follow the peak budgets;
- `row`: one peak budget, all save budgets from large to small, each solved only if no answer so far fits it;
- `greedy_frontier`: for blocks too large for exact solving, all frontiers.

The formulations that take part are in `sources.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.block.greedy.lazy import Candidate
from stowage.stages.formulations.block.greedy.selective import best_within, family, report_of
from stowage.stages.formulations.block.retention import smallest_peak
from stowage.stages.formulations.block.staged_order import (
    Executions,
    StagedGraph,
    cost_of,
    run_once,
    schedule_of,
    timeline,
)
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.ir.defaults import (
    CLUSTER_FORMULATION,
    FORMULATION,
    MAX_EXACT_NODES,
    PEAK_BUDGETS,
    SAVE_BUDGETS,
)
from stowage.stages.options.exact import SAME, fastest_exact, solve_exactly
from stowage.stages.options.sources import Fixed, Frontier, sources_of
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class Found:
    """A schedule and how it was found."""

    schedule: BlockSchedule
    report: SolveReport


@dataclass(frozen=True)
class Grid:
    """Budgets to solve for, and the schedules known before solving.

    Attributes:
        peaks: M_peak, bytes, largest first.
        saves: M_save, bytes, largest first.
        found: schedules that need no exact solving: fixed policies, the greedy family and frontiers.
        smallest: stages of each node in the schedule of the smallest peak, from which tight rows start.
    """

    peaks: tuple[int, ...]
    saves: tuple[int, ...]
    found: tuple[Found, ...]
    smallest: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GridSize:
    """The extent of the search.

    Attributes:
        peak_budgets, save_budgets: number of values of each budget (thesis 2.6.0.0.1).
        computations: the most computations of a node in exact solving; more than two only where two do not fit.
        max_exact_nodes: blocks with more nodes are left to frontiers and clusters.
        tiny_nodes: blocks with no more nodes are also solved by every exact formulation that takes tiny blocks.
        greedy_levels: number of peak budgets of the greedy frontier for blocks that are not solved exactly.
        cluster_peaks, cluster_saves: number of values of each budget for a cluster.
        top_peaks, top_saves: number of values of each budget for the graph of the largest clusters.
        cluster_options: N_o, options that the clusters of one H-Graph offer together (thesis 3.4.5).
        formulation: the formulation of exact solving.
        cluster_formulation: the formulation of clusters that have clusters inside.
    """

    peak_budgets: int = PEAK_BUDGETS
    save_budgets: int = SAVE_BUDGETS
    computations: int = 3
    max_exact_nodes: int = MAX_EXACT_NODES
    tiny_nodes: int = 8
    greedy_levels: int = 24
    cluster_peaks: int = 6
    cluster_saves: int = 4
    top_peaks: int = 8
    top_saves: int = 2
    cluster_options: int = 200
    formulation: str = FORMULATION
    cluster_formulation: str = CLUSTER_FORMULATION

    def inside(self) -> GridSize:
        """Return the extent for clusters of nodes alone, which are solved as blocks are."""
        return replace(self, peak_budgets=self.cluster_peaks, save_budgets=self.cluster_saves)


def fixed_policies(graph: BlockGraph) -> list[Found]:
    """Make one schedule of each fixed policy, such as keep-all and recompute-all."""
    bound = sum(node.time_s for node in graph.nodes)
    found = []
    for policy in sources_of(Fixed):
        schedule = policy.solve(graph)
        cost = replay_block(graph, schedule)
        time_s = cost.forward_time_s + cost.backward_time_s
        found.append(Found(schedule, SolveReport(policy.name, "heuristic", time_s, min(bound, time_s))))
    return found


def frontiers(graph: BlockGraph, levels: int, *, small: bool) -> list[Found]:
    """Find schedules from much memory to little; `small` where the block is solved exactly too."""
    asked = [source for source in sources_of(Frontier) if source.small or not small]
    return [Found(schedule, report) for source in asked for schedule, report in source.solve(graph, levels)]


def grid(graph: BlockGraph, size: GridSize, settings: SolverSettings) -> Grid:
    """Choose budgets evenly spaced (2.6.0.0.1) over the range that can be met.

    Peaks go from the smallest found to plain PyTorch's, saves from the block's output to what plain PyTorch saves.
    """
    staged = StagedGraph.of(graph)
    plain = cost_of(staged, timeline(staged, run_once(staged)))
    greedy = family(staged)
    smallest = min(greedy, key=lambda c: (c.cost.peak_bytes, c.cost.time_s))
    hint = smallest.executions if _most_runs(smallest.executions) <= size.computations else None
    executions, least = smallest_peak(graph, settings, computations=size.computations, hint=hint)
    output = sum(staged.nbytes[a] for a in set(graph.output))
    found = [
        *fixed_policies(graph),
        *(Found(schedule_of(staged, c.line), report_of(staged, c)) for c in greedy),
        *frontiers(graph, size.peak_budgets, small=True),
        _found(staged, executions, "smallest_peak"),
    ]
    peaks = _spaced(min(least, plain.peak_bytes), plain.peak_bytes, size.peak_budgets)
    saves = _spaced(output, max(output, plain.save_bytes), size.save_budgets)
    return Grid(peaks, saves, tuple(found), tuple(tuple(executions[k]) for k in range(len(staged.nodes))))


def row(
    graph: BlockGraph,
    peak_bytes: int,
    saves: Sequence[int],
    size: GridSize,
    settings: SolverSettings,
    smallest: Sequence[Sequence[int]],
) -> list[Found]:
    """Find the fastest schedules under one peak budget, for save budgets largest first; `smallest` as in `Grid`."""
    staged = StagedGraph.of(graph)
    starts = family(staged)
    tightest = {k: list(stages) for k, stages in enumerate(smallest)}
    least = cost_of(staged, timeline(staged, tightest))
    found: list[Found] = []
    settled: int | None = None
    bound_s, near = sum(node.time_s for node in graph.nodes), None
    for save_bytes in saves:
        if settled is not None and settled <= save_bytes:
            continue
        greedy = best_within(staged, starts, peak_bytes, save_bytes)
        if greedy and greedy.cost.time_s <= bound_s * SAME:
            report = SolveReport("selective", "optimal", greedy.cost.time_s, greedy.cost.time_s)
            found.append(Found(schedule_of(staged, greedy.line), report))
            settled = greedy.cost.save_bytes
            continue
        within = _hint(greedy, size.computations)
        if within is None and least.peak_bytes <= peak_bytes and least.save_bytes <= save_bytes:
            within = tightest
        near = within or near
        budgets = peak_bytes, save_bytes
        answer = solve_exactly(
            size.formulation, graph, budgets, settings, computations=size.computations, within=within, near=near
        )
        if size.formulation == FORMULATION and len(graph.nodes) <= size.tiny_nodes:
            answer = fastest_exact(answer, graph, budgets, settings)
        schedule, report_, executions = answer
        if report_ is not None and report_.status != "optimal":
            # What is not proven here will hardly be proven for less memory.
            settings = replace(settings, time_limit_s=settings.time_limit_s / 2)
        faster = greedy and (schedule is None or report_ is None or greedy.cost.time_s < report_.objective_s / SAME)
        if greedy and faster:
            # It has more computations of a node than the exact model may use, or the exact model hit its limit.
            found.append(Found(schedule_of(staged, greedy.line), report_of(staged, greedy)))
            settled = greedy.cost.save_bytes
        if schedule is None or report_ is None:
            if greedy is None:
                break  # there is none, or it was not found in time: smaller budgets are harder
            continue
        near = executions or near
        found.append(Found(schedule, report_))
        if not faster:
            settled = replay_block(graph, schedule).save_bytes
        bound_s = max(bound_s, report_.bound_s)
    return found


def greedy_frontier(graph: BlockGraph, size: GridSize) -> list[Found]:
    """Find all frontiers, and the fixed policies."""
    return [*fixed_policies(graph), *frontiers(graph, size.greedy_levels, small=False)]


def _found(staged: StagedGraph, executions: Executions, formulation: str) -> Found:
    line = timeline(staged, executions)
    bound = sum(node.time_s for node in staged.nodes)
    return Found(schedule_of(staged, line), SolveReport(formulation, "heuristic", cost_of(staged, line).time_s, bound))


def _hint(greedy: Candidate | None, computations: int) -> Executions | None:
    if greedy is None or _most_runs(greedy.executions) > computations:
        return None
    return greedy.executions


def _most_runs(executions: Executions) -> int:
    return max((len(stages) for stages in executions.values()), default=0)


def _spaced(low: int, high: int, count: int) -> tuple[int, ...]:
    """Return `count` values from `high` down to `low`, both included, without repetitions."""
    if count < 2:
        return (high,)
    return tuple(sorted({high - (high - low) * i // (count - 1) for i in range(count)}, reverse=True))

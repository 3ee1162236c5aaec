"""Everything that `solve` reads, made quickly: made-up costs, and options from the greedy frontier alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from stowage.stages.formulations.block.fixed import keep_all, recompute_all
from stowage.stages.formulations.block.greedy.selective import selective_frontier
from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind
from stowage.stages.options.generate import options_of
from stowage.stages.options.tasks import Found
from stowage.stages.partition import make_blocks
from stowage.stages.simulate.block import replay_block
from stowage.stages.simulate.plan import replay_plan
from stowage.stages.solve import PlanRequest, solve_plan
from stowage.stages.solve.cuts.transfers import peaks_of
from stowage.stages.solve.summary import Solved
from stowage.stages.solver.outcome import SolverSettings
from tests.solve.synthetic_steps import costs_for

PLENTY = 1 << 50

SMALL = 150
"""Nodes of a step of which every plan is compared with a bound: larger ones take longer to bound than to plan."""

SAME = 1 + 1e-12
"""The same times may be added up in another order."""


@dataclass(frozen=True)
class Prepared:
    """The tables of the stages before `solve`."""

    trace: TraceTables
    nodes: list[ComputeNode]
    blocks: list[Block]
    options: list[Option]

    def solve(self, budget: int = PLENTY, method: str = "auto", slots: int = 100) -> Solved:
        """The plan for a budget; that of a small step is compared with what no schedule beats."""
        solved = solve_plan(
            self.trace,
            self.nodes,
            self.blocks,
            self.options,
            PlanRequest(budget, method=method, slots=slots, device="made up"),
        )
        if len(self.nodes) <= SMALL:
            assert solved.summary.step_time_s * SAME >= self.bound_s(budget)
        return solved

    def bound_s(self, budget: int) -> float:
        """A time that no schedule within a budget beats: one cut where keeping everything needs most, relaxed."""
        if budget >= max(self._peaks.values(), default=0):
            return self._step.once_s
        if budget not in self._bounds:
            cuts = Choice(self._step).hottest(self._peaks, 1)
            found = solve_cuts(self._step, cuts, budget, SolverSettings(10.0), integral=False)
            assert found.status != "infeasible", "a plan was made of what no schedule can do"
            self._bounds[budget] = found.bound_s
        return self._bounds[budget]

    @cached_property
    def _step(self) -> StepGraph:
        return StepGraph.of(self.trace, self.nodes)

    @cached_property
    def _peaks(self) -> dict[int, int]:
        return {n: self._step.base_bytes + peak for n, peak in peaks_of(self._step).items()}

    @cached_property
    def _bounds(self) -> dict[int, float]:
        return {}

    def smallest(self) -> Solved:
        """The plan for the smallest feasible budget: as much recomputation as there can be."""
        return self.solve(self.solve().summary.smallest_feasible_bytes)

    def keep(self) -> frozenset[int]:
        """Storages that an iteration leaves behind."""
        return frozenset(self.trace.values[v].storage for v in left_behind(self.trace))

    def judge(self, solved: Solved, budget: int) -> None:
        """The referee's own verdict on a plan's rows, against what the plan says of itself."""
        steps = [Step(r.node, r.storage, r.step) for r in solved.rows]
        outcome = replay_plan(self.trace.storages, self.nodes, steps, keep=self.keep(), budget_bytes=budget)
        assert outcome.rows == solved.rows
        assert outcome.peak_bytes == solved.summary.device_peak_bytes <= budget
        assert outcome.time_s == solved.summary.step_time_s
        assert outcome.time_s * SAME >= self.bound_s(budget)


@cache
def _frontier(graph: BlockGraph, levels: int) -> tuple[Found, ...]:
    def fixed(name: str, schedule: BlockSchedule) -> Found:
        cost = replay_block(graph, schedule)
        total = cost.forward_time_s + cost.backward_time_s
        return Found(schedule, SolveReport(name, "heuristic", total, 0.0))

    greedy = [Found(schedule, report) for schedule, report in selective_frontier(graph, levels)]
    return (fixed("keep_all", keep_all(graph)), fixed("recompute_all", recompute_all(graph)), *greedy)


def light_options(blocks: Sequence[Block], levels: int = 4) -> list[Option]:
    """Keep all, recompute all, and a few greedy schedules of each distinct block."""
    graphs = {b.block_hash: BlockGraph.from_json(b.graph) for b in blocks}
    return [o for graph in graphs.values() for o in options_of(graph, _frontier(graph, levels))]


def prepare_trace(trace: TraceTables, levels: int = 4) -> Prepared:
    """From a trace to what `solve` reads."""
    nodes, blocks = make_blocks(trace, costs_for(trace))
    return Prepared(trace, nodes, blocks, light_options(blocks, levels))


@cache
def prepared_zoo(name: str, optimizer: str = "AdamW", *, freezes: bool = False) -> Prepared:
    """A model of the zoo, traced once a session; never train the objects behind it."""
    from tests.zoo import ZOO

    return prepare_model(ZOO[name], name, optimizer, freezes=freezes)


def prepare_model(
    build: Callable[[], Any], name: str, optimizer: str = "AdamW", levels: int = 4, *, freezes: bool = False
) -> Prepared:
    """Trace a model; never train the objects behind it."""
    import torch

    from stowage.stages.trace import trace_step

    model, batch, loss = build()
    made: Any = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3) if optimizer else None
    trace = trace_step(model, batch, loss=loss, optimizer=made, label=name, freezes=freezes)
    return prepare_trace(trace, levels)

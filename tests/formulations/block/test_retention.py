"""Retention intervals: the same optimum as RK-Checkmate and exhaustive search, much faster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.fixed import keep_all
from stowage.stages.formulations.block.retention import retention, smallest_peak, solve_executions
from stowage.stages.formulations.block.rk_checkmate.solve import rk_checkmate
from stowage.stages.formulations.block.staged_order import StagedGraph, cost_of, run_once, timeline
from stowage.stages.ir.block import BlockGraph, BlockSchedule
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.block.brute import fastest
from tests.formulations.block.budgets import blocks_and_budgets, checked, peak_of, total_s
from tests.matrix import examples, some
from tests.strategies import MIB, attention_block, mlp_block

LIMITS = SolverSettings(time_limit_s=20.0)
MANY = 6
"""More computations of a node than a tiny block ever needs."""


def most_runs(schedule: BlockSchedule) -> int:
    """How often the most computed node is computed."""
    rows = (*schedule.forward, *schedule.backward)
    return max(Counter(a.index for a in rows if a.kind == "compute").values())


@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_equals_exhaustive_search(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest(graph, peak, save)
    schedule, report = retention(graph, peak, save, LIMITS, computations=MANY)
    assert (schedule is None) == (best is None)
    if schedule is not None and report is not None and best is not None:
        assert report.status == "optimal"
        assert abs(total_s(checked(graph, schedule, peak, save)) - best) < 1e-4


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_equals_rk_checkmate_unless_that_computes_something_three_times(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    exact, exact_report = rk_checkmate(graph, peak, save, LIMITS)
    schedule, report = retention(graph, peak, save, LIMITS)
    if exact is None or exact_report is None:
        assert schedule is None
        return
    if schedule is None or report is None:
        assert most_runs(exact) > 2
        return
    assert report.objective_s >= exact_report.objective_s - 1e-4
    if most_runs(exact) <= 2:
        assert abs(report.objective_s - exact_report.objective_s) < 1e-4


@pytest.mark.parametrize("block", [attention_block, mlp_block])
@pytest.mark.parametrize(
    ("peak_share", "save_share"),
    some([(1.0, 0.8), (1.0, 0.3), (0.9, 0.6), (0.82, 0.4)], keep=[(1.0, 0.3), (0.82, 0.4)]),
)
def test_realistic_blocks_within_seconds(block: object, peak_share: float, save_share: float) -> None:
    graph: BlockGraph = block()  # type: ignore[operator]
    plain = replay_block(graph, keep_all(graph))
    peak, save = int(peak_of(plain) * peak_share), int(plain.save_bytes * save_share)
    schedule, report = retention(graph, peak, save, LIMITS, computations=3)
    assert schedule is not None
    assert report is not None
    assert report.status == "optimal"
    cost = checked(graph, schedule, peak, save)
    assert abs(total_s(cost) - report.objective_s) < 1e-9
    assert total_s(plain) < total_s(cost) < total_s(plain) + cost.forward_time_s


def test_more_computations_are_never_slower() -> None:
    graph = mlp_block()
    plain = replay_block(graph, keep_all(graph))
    peak, save = int(peak_of(plain) * 0.95), plain.save_bytes // 2
    times = []
    for computations in (2, 3):
        _, report = retention(graph, peak, save, LIMITS, computations=computations)
        assert report is not None
        times.append(report.objective_s)
    assert times[1] < times[0]


def test_hints_change_the_path_not_the_answer() -> None:
    graph = attention_block()
    plain = replay_block(graph, keep_all(graph))
    budgets = int(peak_of(plain) * 0.85), plain.save_bytes
    executions, cold = solve_executions(graph, *budgets, LIMITS)
    assert executions is not None
    assert cold is not None
    for hint in (executions, run_once(StagedGraph.of(graph))):
        _, warm = solve_executions(graph, *budgets, LIMITS, hint=hint)
        assert warm is not None
        assert warm.status == "optimal"
        assert abs(warm.objective_s - cold.objective_s) < 1e-9


def test_equal_inputs_give_an_equal_schedule() -> None:
    graph = attention_block()
    peak = int(peak_of(replay_block(graph, keep_all(graph))) * 0.8)
    assert retention(graph, peak, 40 * MIB, LIMITS) == retention(graph, peak, 40 * MIB, LIMITS)


def test_smallest_peak_is_the_smallest() -> None:
    graph = attention_block()
    executions, peak = smallest_peak(graph, LIMITS)
    staged = StagedGraph.of(graph)
    assert cost_of(staged, timeline(staged, executions)).peak_bytes == peak
    limits = graph.allocations
    everything = sum(a.nbytes for a in limits)
    assert retention(graph, peak, everything, LIMITS)[0] is not None
    assert retention(graph, peak - 1, everything, LIMITS, recompute_backward=False) == (None, None)


def test_a_limit_without_an_answer_is_reported() -> None:
    graph = attention_block()
    plain = replay_block(graph, keep_all(graph))
    schedule, report = retention(
        graph, int(peak_of(plain) * 0.8), plain.save_bytes // 2, SolverSettings(time_limit_s=1e-6)
    )
    assert schedule is None
    assert report is not None
    assert report.status == "feasible"
    assert report.objective_s == float("inf")

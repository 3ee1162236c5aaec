"""Retention intervals over an H-Graph: the optimum of exhaustive search and of H-ILP, much faster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.retention import retention
from stowage.stages.formulations.cluster.h_ilp.solve import h_ilp
from stowage.stages.formulations.cluster.policies import Incumbents, greedy, policy_schedules
from stowage.stages.formulations.cluster.problem import HProblem, flat
from stowage.stages.formulations.cluster.retention.solve import h_retention, smallest_peak
from stowage.stages.formulations.cluster.staged_order import cost_of, timeline
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.h_graph import HGraph, HSchedule
from stowage.stages.simulate.h_graph import replay_h_graph
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.block.budgets import blocks_and_budgets
from tests.formulations.cluster.h_brute import fastest_h
from tests.formulations.cluster.h_graphs import checked_h, h_graphs_and_budgets, layered
from tests.matrix import examples

LIMITS = SolverSettings(time_limit_s=20.0)
MANY = 6
"""More runs of a node than a tiny graph ever needs."""


def most_runs(graph: HGraph, schedule: HSchedule, *, backward: bool) -> int:
    """How often the node that runs most does, of those before or behind the loss."""
    counts = Counter(a.index for a in schedule.actions if a.kind == "compute" and (a.index > graph.loss) == backward)
    return max(counts.values(), default=0)


@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(h_graphs_and_budgets())
def test_equals_exhaustive_search(case: tuple[HGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest_h(graph, peak, save, backward_once=True)
    (answer,) = h_retention(graph, [(peak, save)], LIMITS, computations=MANY)
    if best is None:
        assert answer.feasible is False
        return
    assert answer.schedule is not None
    assert answer.report is not None
    assert answer.report.status == "optimal"
    assert abs(checked_h(graph, answer.schedule, peak, save).time_s - best) < 1e-4


@settings(max_examples=examples(12), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(h_graphs_and_budgets())
def test_equals_h_ilp_where_that_stays_within_the_restrictions(case: tuple[HGraph, int, int]) -> None:
    graph, peak, save = case
    (exact,) = h_ilp(graph, [(peak, save)], LIMITS)
    (answer,) = h_retention(graph, [(peak, save)], LIMITS)
    if exact.schedule is None or exact.report is None:
        assert answer.schedule is None
        return
    restricted = (
        most_runs(graph, exact.schedule, backward=False) > 2 or most_runs(graph, exact.schedule, backward=True) > 1
    )
    if answer.report is None:
        assert restricted
        return
    assert answer.report.objective_s >= exact.report.objective_s - 1e-4
    if not restricted:
        assert abs(answer.report.objective_s - exact.report.objective_s) < 1e-4


@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_a_flat_graph_has_the_optimum_of_its_block(case: tuple[BlockGraph, int, int]) -> None:
    block, peak, save = case
    report = retention(block, peak, save, LIMITS, computations=3)[1]
    (answer,) = h_retention(flat(block), [(peak, save)], LIMITS, computations=3, recompute_backward=True)
    if report is None or answer.report is None:
        # A policy may run a node more often than the model.
        assert report is None
        assert answer.report is None or answer.report.status == "heuristic"
        return
    assert answer.report.objective_s <= report.objective_s + 1e-4
    if answer.report.status == "optimal":
        assert abs(answer.report.objective_s - report.objective_s) < 1e-4


@pytest.mark.parametrize(("skips", "share"), [(True, 0.6), (False, 0.4)])
def test_twenty_clusters_within_two_percent(skips: bool, share: float) -> None:
    graph = layered(20, 6, skips=skips)
    plain = replay_h_graph(graph, policy_schedules(graph)["keep_all"])
    budget = int(plain.peak_bytes * share)
    (answer,) = h_retention(graph, [(budget, budget)], SolverSettings(time_limit_s=20.0, gap=0.02))
    assert answer.schedule is not None
    assert answer.report is not None
    assert answer.report.status == "optimal"
    assert answer.report.gap <= 0.02
    cost = checked_h(graph, answer.schedule, budget, budget)
    assert plain.time_s < answer.report.bound_s <= cost.time_s
    by_rule = greedy(graph, budget, budget)
    assert by_rule is not None
    assert by_rule.report is not None
    assert answer.report.objective_s <= by_rule.report.objective_s


def test_keeping_all_is_known_to_be_best_without_solving() -> None:
    graph = layered(6, 3)
    plain = replay_h_graph(graph, policy_schedules(graph)["keep_all"])
    (answer,) = h_retention(graph, [(plain.peak_bytes, plain.save_bytes)], SolverSettings(time_limit_s=1e-6))
    assert answer.report is not None
    assert answer.report.status == "optimal"
    assert answer.report.gap == 0.0
    assert abs(answer.report.objective_s - plain.time_s) < 1e-9


def test_smallest_peak_is_the_smallest() -> None:
    graph = layered(6, 3)
    data = HProblem(graph)
    runs, peak = smallest_peak(Incumbents(data), LIMITS)
    assert cost_of(data, timeline(data, runs)).peak_bytes == peak
    everything = sum(data.nbytes) + 10**9
    fits, none = h_retention(graph, [(peak, everything), (peak - 1, everything)], LIMITS)
    assert fits.schedule is not None
    checked_h(graph, fits.schedule, peak, everything)
    assert none.feasible is False


def test_earlier_answers_help_later_ones_and_do_no_harm() -> None:
    graph = layered(6, 4)
    peak = replay_h_graph(graph, policy_schedules(graph)["keep_all"]).peak_bytes
    budgets = [(int(peak * share), peak) for share in (0.9, 0.6, 0.5)]
    together = h_retention(graph, budgets, LIMITS)
    for pair, answer in zip(budgets, together, strict=True):
        (alone,) = h_retention(graph, [pair], LIMITS)
        assert alone.report is not None
        assert answer.report is not None
        assert abs(alone.report.objective_s - answer.report.objective_s) < 1e-6


def test_equal_inputs_give_an_equal_answer() -> None:
    graph = layered(8, 4)
    peak = replay_h_graph(graph, policy_schedules(graph)["keep_all"]).peak_bytes // 2
    assert h_retention(graph, [(peak, peak)], LIMITS) == h_retention(graph, [(peak, peak)], LIMITS)


def test_a_limit_is_reported() -> None:
    graph, hurry = layered(8, 4), SolverSettings(time_limit_s=1e-6)
    peak = replay_h_graph(graph, policy_schedules(graph)["keep_all"]).peak_bytes // 2
    by_rule, nothing = h_retention(graph, [(peak, peak), (peak // 4, peak // 4)], hurry)
    assert by_rule.schedule is not None
    assert by_rule.report is not None
    assert by_rule.report.status == "heuristic"
    assert by_rule.report.bound_s < by_rule.report.objective_s
    checked_h(graph, by_rule.schedule, peak, peak)
    assert nothing.feasible is None
    assert nothing.schedule is None

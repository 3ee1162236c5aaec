"""Schedules of an H-Graph over its budgets, whoever solves them."""

from __future__ import annotations

from stowage.stages.formulations.cluster.policies import keep_all
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.options.clusters.explore import HExploration, HFound
from stowage.stages.options.workers.pool import Job, work
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cluster.h_graphs import layered

LIMITS = SolverSettings(time_limit_s=5.0, gap=0.01)


def explored(
    graph: HGraph, peaks: int, saves: int, settings: SolverSettings = LIMITS, workers: int = 1
) -> list[HFound]:
    """All that is found."""
    found: list[HFound] = []

    def finish(everything: list[HFound]) -> list[Job]:
        found.extend(everything)
        return []

    work([HExploration(graph, peaks, saves, settings, finish).first()], workers)
    return found


def test_exploring_gives_a_front_without_repetitions() -> None:
    graph = layered(5, 3)
    found = explored(graph, 4, 3)
    schedules = [one.schedule for one in found]
    assert len(schedules) == len(set(schedules))
    times = [one.report.objective_s for one in found]
    assert times[0] == min(times) == keep_all(HProblem(graph)).cost.time_s
    assert len(set(times)) > 4
    assert {"smallest_peak", "h_policies"} & {one.report.formulation for one in found}


def test_explorations_do_not_differ_by_workers() -> None:
    graph = layered(5, 3)
    assert explored(graph, 4, 3, workers=1) == explored(graph, 4, 3, workers=3)

"""The piece of work behind one cluster that has clusters inside: schedules of its H-Graph over both budgets."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.formulations.h_answer import answer_of
from stowage.stages.formulations.h_budgets import explore
from stowage.stages.formulations.h_policies import starts
from stowage.stages.formulations.h_problem import HProblem
from stowage.stages.formulations.h_retention import HRetention, smallest_peak
from stowage.stages.ir.block import SolveReport
from stowage.stages.ir.h_graph import HGraph, HSchedule
from stowage.stages.simulate.h_graph import replay_h_graph
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class HFound:
    """A schedule of an H-Graph and how it was found."""

    schedule: HSchedule
    report: SolveReport


def explored(graph: HGraph, peaks: int, saves: int, settings: SolverSettings) -> list[HFound]:
    """Schedules for several budgets, the fixed policies, and the smallest peak found; all pass the referee.

    Args:
        graph: the cluster.
        peaks, saves: values of M_peak, and for each of M_save.
        settings: limits of each solve.

    Raises:
        IllegalPlanError: a formulation's bug.
    """
    data = HProblem(graph)
    solver = HRetention(graph, settings)
    runs, least = smallest_peak(data, settings)
    no_limit = sum(data.nbytes) + least, sum(data.nbytes) + least
    answers = explore(data, solver.solve, least, peaks, saves)
    answers.append(answer_of(data, no_limit, runs, "heuristic", data.floor_s, "smallest_peak"))
    answers.extend(answer_of(data, no_limit, c.runs, "heuristic", data.floor_s, "h_policies") for c in starts(data))
    found: dict[HSchedule, HFound] = {}
    for answer in answers:
        if answer.schedule is not None and answer.report is not None:
            found.setdefault(answer.schedule, HFound(answer.schedule, answer.report))
    for schedule in found:
        replay_h_graph(graph, schedule)
    return list(found.values())

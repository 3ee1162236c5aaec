"""Solves one cluster with clusters inside for several budgets; those of one round are solved in parallel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.cluster.answer import Budgets, HAnswer
from stowage.stages.formulations.cluster.budgets import Met, explore
from stowage.stages.ir.block import SolveReport
from stowage.stages.ir.defaults import CLUSTER_FORMULATION
from stowage.stages.ir.h_graph import HGraph, HSchedule
from stowage.stages.options.clusters.tasks import HSolved
from stowage.stages.options.workers.pool import Answer, Job
from stowage.stages.options.workers.worker import h_ends_request, h_solve_request, unpack_ends, unpack_solved
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class HFound:
    """A schedule of an H-Graph and how it was found."""

    schedule: HSchedule
    report: SolveReport


class HExploration:
    """Finds schedules of an H-Graph for several budgets, with the fixed policies and the smallest peak."""

    def __init__(
        self,
        graph: HGraph,
        peaks: int,
        saves: int,
        settings: SolverSettings,
        finish: Callable[[list[HFound]], Iterable[Job]],
        formulation: str = CLUSTER_FORMULATION,
    ) -> None:
        """Prepare the search for one cluster.

        Args:
            graph: the cluster.
            peaks: number of values of M_peak.
            saves: number of values of M_save for each of them.
            settings: limits of each solve.
            finish: called with all schedules found.
            formulation: the name of a `Cluster` source.
        """
        self._formulation = formulation
        self._graph, self._settings, self._counts, self._finish = graph, settings, (peaks, saves), finish
        self._policies: tuple[HAnswer, ...] = ()
        self._solved: list[HSolved] = []
        self._rounds: Generator[list[Budgets], Sequence[Met | None], None]

    def first(self) -> Job:
        """Return the job that finds the range of budgets."""
        return Job(h_ends_request(self._graph, self._settings, self._formulation), self._started)

    def _started(self, answer: Answer) -> Iterable[Job]:
        ends = unpack_ends(answer)
        self._policies = ends.found
        self._rounds = explore(ends.smallest_peak, ends.largest_peak, ends.leaving, *self._counts)
        return self._round(next(self._rounds, []))

    def _round(self, asked: list[Budgets]) -> Iterable[Job]:
        if not asked:
            return self._finish(self._distinct())
        known = [one.answer for one in self._solved]
        arrived: dict[int, HSolved] = {}

        def follow(position: int) -> Callable[[Answer], Iterable[Job]]:
            def arrive(answer: Answer) -> Iterable[Job]:
                arrived[position] = unpack_solved(answer)
                if len(arrived) < len(asked):
                    return ()
                found = [arrived[i] for i in range(len(asked))]  # in the order asked, so that every run is equal
                self._solved += found
                try:
                    return self._round(self._rounds.send([one.met for one in found]))
                except StopIteration:
                    return self._finish(self._distinct())

            return arrive

        return [
            Job(h_solve_request(self._graph, self._settings, self._formulation, budgets, known), follow(i))
            for i, budgets in enumerate(asked)
        ]

    def _distinct(self) -> list[HFound]:
        found: dict[HSchedule, HFound] = {}
        for answer in (*(one.answer for one in self._solved), *self._policies):
            if answer.schedule is not None and answer.report is not None:
                found.setdefault(answer.schedule, HFound(answer.schedule, answer.report))
        return list(found.values())

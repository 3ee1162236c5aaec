"""The pieces of work of one cluster with clusters inside: the range of its budgets, and the solve of one pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.formulations.cluster.answer import Budgets, HAnswer, answer_of
from stowage.stages.formulations.cluster.budgets import Met
from stowage.stages.formulations.cluster.policies import keep_all
from stowage.stages.formulations.cluster.staged_order import cost_of, timeline
from stowage.stages.ir.defaults import CLUSTER_FORMULATION
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.options.sources import ClusterSource, source_of
from stowage.stages.simulate.h_graph import replay_h_graph
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class Ends:
    """The range of budgets for which an H-Graph is worth solving, and the schedules known before that.

    Attributes:
        smallest_peak, largest_peak: the least M_peak found, and keep-all's, bytes.
        leaving: bytes of what leaves forward: the least M_save.
        found: the fixed policies, and the schedule of the smallest peak.
    """

    smallest_peak: int
    largest_peak: int
    leaving: int
    found: tuple[HAnswer, ...]


@dataclass(frozen=True)
class HSolved:
    """An answer, and what its schedule takes; None where there is no schedule."""

    answer: HAnswer
    met: Met | None


class HTasks:
    """Does the work of one H-Graph; all its schedules pass the referee.

    Raises:
        IllegalPlanError: a formulation has a bug.
    """

    def __init__(self, graph: HGraph, settings: SolverSettings, formulation: str = CLUSTER_FORMULATION) -> None:
        """Prepare the solver of one H-Graph.

        Args:
            graph: the cluster.
            settings: limits of each solve.
            formulation: the name of a `ClusterSource` source.
        """
        self._graph = graph
        self._solver = source_of(ClusterSource, formulation, "options.cluster_formulation").prepare(graph, settings)

    def ends(self) -> Ends:
        """Find the smallest peak."""
        data, incumbents = self._solver.data, self._solver.incumbents
        runs, least = self._solver.smallest_peak()
        no_limit = sum(data.nbytes) + least, sum(data.nbytes) + least
        answers = [answer_of(data, no_limit, runs, "heuristic", data.floor_s, "smallest_peak")]
        policies = incumbents.policies
        answers += [answer_of(data, no_limit, c.runs, "heuristic", data.floor_s, "h_policies") for c in policies]
        for answer in answers:
            self._check(answer)
        leaving = sum(data.nbytes[d] for d in set(data.graph.nodes[data.graph.loss].reads))
        return Ends(least, keep_all(data).cost.peak_bytes, leaving, tuple(answers))

    def solve(self, budgets: Budgets, known: Sequence[HAnswer]) -> HSolved:
        """Find the fastest schedule within one pair of budgets, given answers for others."""
        answer = self._solver.solve(budgets, known)
        self._check(answer)
        if answer.runs is None:
            return HSolved(answer, None)
        cost = cost_of(self._solver.data, timeline(self._solver.data, answer.runs))
        return HSolved(answer, Met(cost.time_s, cost.peak_bytes, cost.save_bytes))

    def _check(self, answer: HAnswer) -> None:
        if answer.schedule is not None:
            replay_h_graph(self._graph, answer.schedule)

"""Solves a block, or a cluster of nodes alone, for one pair of budgets by the formulation that settings name."""

from __future__ import annotations

from stowage.stages.formulations.block.staged_order import Executions
from stowage.stages.ir.block import BlockGraph
from stowage.stages.options.intervals import IntervalAnswer, Starts
from stowage.stages.options.sources import Exact, source_of, sources_of
from stowage.stages.solver.outcome import SolverSettings

SAME = 1.0 + 1e-9
"""Factor within which times are equal: they are sums of floats in different orders."""


def solve_exactly(
    formulation: str,
    block: BlockGraph,
    budgets: tuple[int, int],
    settings: SolverSettings,
    *,
    computations: int,
    within: Executions | None,
    near: Executions | None,
) -> IntervalAnswer:
    """Find the fastest schedule within M_peak and M_save, bytes.

    Args:
        formulation: the name of an `Exact` source.
        block: graph to schedule.
        budgets: M_peak and M_save.
        settings: limits of the solver.
        computations: the most computations of a node, as in `Starts`.
        within: executions within both budgets.
        near: executions within similar budgets.
    """
    source = source_of(Exact, formulation, "options.formulation")
    return source.solve(block, budgets, settings, Starts(computations, within, near))


def fastest_exact(
    answer: IntervalAnswer, block: BlockGraph, budgets: tuple[int, int], settings: SolverSettings
) -> IntervalAnswer:
    """Return the fastest of an answer and those of other formulations, which may run a node any number of times."""
    starts = Starts(0, answer.executions)
    for source in sources_of(Exact):
        rival = source.solve(block, budgets, settings, starts) if source.takes_tiny else None
        if rival is None or rival.schedule is None or rival.report is None:
            continue
        if (
            answer.schedule is None
            or answer.report is None
            or rival.report.objective_s * SAME < answer.report.objective_s
        ):
            answer, starts = rival, Starts(0, rival.executions)
    return answer

"""Reads the section `options` of params.yaml as the settings of a search, for the stage, the flow and `batch_size`."""

from __future__ import annotations

from stowage.stages.options.sources import ClusterSource, Exact, source_of
from stowage.stages.options.tasks import GridSize
from stowage.stages.settings import OptionsSettings
from stowage.stages.solver.outcome import SolverSettings


def search_of(settings: OptionsSettings) -> tuple[GridSize, SolverSettings]:
    """Return budgets and limits of the search, and limits of each solve.

    Raises:
        ParameterError: a formulation has an unknown name.
    """
    source_of(Exact, settings.formulation, "options.formulation")
    source_of(ClusterSource, settings.cluster_formulation, "options.cluster_formulation")
    size = GridSize(
        peak_budgets=settings.peak_budgets,
        save_budgets=settings.save_budgets,
        max_exact_nodes=settings.max_exact_nodes,
        formulation=settings.formulation,
        cluster_formulation=settings.cluster_formulation,
    )
    return size, SolverSettings(time_limit_s=settings.time_limit_s, seed=settings.seed)

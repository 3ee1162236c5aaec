"""What the section `options` of params.yaml asks of a search: the same for the stage, the flow and `batch_size`."""

from __future__ import annotations

from stowage.stages.options.tasks import GridSize
from stowage.stages.settings import OptionsSettings
from stowage.stages.solver.outcome import SolverSettings


def search_of(settings: OptionsSettings) -> tuple[GridSize, SolverSettings]:
    """Budgets and limits of the search, and limits of each solve."""
    size = GridSize(
        peak_budgets=settings.peak_budgets,
        save_budgets=settings.save_budgets,
        max_exact_nodes=settings.max_exact_nodes,
        formulation=settings.formulation,
    )
    return size, SolverSettings(time_limit_s=settings.time_limit_s, seed=settings.seed)

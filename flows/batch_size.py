"""Finds which batch size takes least time per sample within the budget of `params.yaml`.

python -m stowage.flows.batch_size
python -m stowage.flows.batch_size --largest 256
python -m stowage.flows.batch_size --set solve.device_budget=900MiB

Prints what was planned and what to put into `params.yaml`; changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stowage.flows.pipeline.command import Assignments, one_sentence, overrides_of, run_command
from stowage.flows.pipeline.overrides import override
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.command import DEVICE, STORE
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.defaults import LARGEST_BATCH
from stowage.stages.ir.table import read_record
from stowage.stages.settings import Settings, parse_settings
from stowage.stages.settings.load import read_parameters


def choose(root: Path, overrides: dict[str, Any], largest: int) -> str:
    """Plan batch sizes for the job of `params.yaml`, with the stores of the project.

    Returns:
        What was found, for people.

    Raises:
        StowageError: a parameter is wrong, or one sample does not fit the budget.
    """
    settings = parse_settings(override(read_parameters(root / "params.yaml"), overrides, "params.yaml"))
    found = _planner(root, settings).choose(settings.solve.device_budget, largest)
    lines = [found.describe(), "", "in params.yaml:", "trace:", f"  batch_size: {found.batch_size}"]
    if str(settings.solve.device_budget).endswith("%"):
        # A percentage would be of plain PyTorch's peak with the new batch.
        lines += ["solve:", f"  device_budget: {found.device_budget_bytes}"]
    return "\n".join(lines)


def _planner(root: Path, settings: Settings) -> Any:
    """Make the planner with model, batch and limits as the stages have them."""
    # Imports torch and transformers, which take seconds.
    from stowage.flows.planning.batch_sizes import BatchPlanner
    from stowage.flows.planning.configured import effort_of, step_of
    from stowage.flows.planning.job import Planning
    from stowage.stages.solve.parameters import configured_lower_tier
    from stowage.stages.workload.resize import samples_of

    target = read_record(root / DEVICE, DeviceDescription).among(settings.trace.ranks)
    wanted = settings.solve
    effort, step = effort_of(settings), step_of(settings)
    how = Planning(
        stores=root / STORE,
        effort=effort,
        costs=settings.profile.costs,
        target=target,
        method=wanted.method,
        lower_tier=configured_lower_tier(target, wanted),
    )
    samples = samples_of(step.batch)
    return BatchPlanner(step=step, samples=samples, how=how, say=lambda text: typer.echo(text, err=True))


def main(
    assignments: Assignments = None,
    largest: Annotated[int, typer.Option(help="The largest batch size worth having.", min=1)] = LARGEST_BATCH,
) -> None:
    """Estimate the best batch size of the job of params.yaml, and plan the whole numbers next to it."""
    with one_sentence():
        typer.echo(choose(find_root(), overrides_of(assignments), largest))


if __name__ == "__main__":
    run_command(main)

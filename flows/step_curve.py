"""Predicts step time against budget for the job of `params.yaml`, before a budget is chosen, or a card is bought.

python -m stowage.flows.step_curve
python -m stowage.flows.step_curve --budgets 80%,60%,900MiB
python -m stowage.flows.step_curve --device rtx-4090

Prints a table and writes `curve.parquet` and `curve.png`; `params.yaml` stays as it is. In a script it is
`from stowage.flows import curve`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stowage.flows.pipeline.command import Assignments, one_sentence, overrides_of, run_command
from stowage.flows.pipeline.overrides import override
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.command import DEVICE, STORE
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.table import read_record
from stowage.stages.settings import Settings, parse_settings
from stowage.stages.settings.load import read_parameters

if TYPE_CHECKING:
    from stowage.flows.planning.curve_result import Curve

POINTS = 12
OUT = Path("artifacts") / "curve"


def curve_of_project(
    root: Path, overrides: dict[str, Any], budgets: int | list[str], device: str | None, ram: str | None
) -> Curve:
    """Plan the job of `params.yaml` within several budgets, with the stores of the project.

    Args:
        root: folder of the project.
        overrides: values of parameters for this run only.
        budgets: how many, or which.
        device: a card that need not be here; the target of the project by default.
        ram: pinned memory that plans for that card may use.

    Raises:
        StowageError: a parameter is wrong, or no budget has a plan.
    """
    # Imports torch and transformers, which take seconds.
    from stowage.flows.api.curve import Subject, card_of, dtype_of, effort_for
    from stowage.flows.planning.configured import effort_of, step_of
    from stowage.flows.planning.job import Planning
    from stowage.stages.solve import lower_tier_of
    from stowage.stages.solve.parameters import configured_lower_tier

    settings: Settings = parse_settings(override(read_parameters(root / "params.yaml"), overrides, "params.yaml"))
    wanted = settings.solve
    effort, step = effort_of(settings), step_of(settings)
    card = card_of(device) if device is not None else None
    if card is None and ram is not None:
        raise ParameterError("--ram goes with --device; for the device of this project set solve.host_budget.")
    if card is not None:
        target = card.described(dtype_of(step.model))
        lower_tier = lower_tier_of(target, host_budget=ram, disk_budget=None, offload_dir=None)
    else:
        target = read_record(root / DEVICE, DeviceDescription).among(settings.trace.ranks)
        lower_tier = configured_lower_tier(target, wanted)
    how = Planning(
        stores=root / STORE,
        effort=effort_for(effort, card),
        costs="roofline" if card is not None else settings.profile.costs,
        target=target,
        method=wanted.method,
    )
    subject = Subject(step, how)
    found = subject.curve(
        step.batch,
        budgets,
        lower_tier,
        card,
        answered=lambda answer: typer.echo(f"{answer.line}\nplanning the curve…", err=True),
    )
    for notice in how.notices:
        typer.echo(notice, err=True)
    return found


def main(
    assignments: Assignments = None,
    points: Annotated[
        int, typer.Option(help="How many budgets, from keeping everything to the least.", min=2)
    ] = POINTS,
    budgets: Annotated[str, typer.Option(help="Instead: which, with commas, `80%,60%,900MiB`.")] = "",
    device: Annotated[
        str | None, typer.Option(help="A card that need not be here, `rtx-4090`, or a JSON file that describes one.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="Of --device: pinned RAM that plans may use; else only if nothing else fits.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where curve.parquet and curve.png go; artifacts/curve by default.")
    ] = None,
) -> None:
    """Predict step time against budget, before a budget is chosen or a card is bought."""
    with one_sentence():
        root = find_root()
        wanted: int | list[str] = [part.strip() for part in budgets.split(",")] if budgets else points
        found = curve_of_project(root, overrides_of(assignments), wanted, device, ram)
        typer.echo(str(found))
        typer.echo("")
        for path in found.write(out or root / OUT):
            typer.echo(path)


if __name__ == "__main__":
    run_command(main)

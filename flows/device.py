"""Measure this machine and make it the target of plans.

python -m stowage.flows.device
python -m stowage.flows.device cuda
python -m stowage.flows.device --again
python -m stowage.flows.device --ranks 2      for `trace.ranks: 2`: what the ranks send each other is timed too
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from stowage.flows.pipeline.command import one_sentence, run_command
from stowage.flows.pipeline.dvc import python_command, run_quietly
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.command import DEVICE
from stowage.stages.ir.errors import StowageError


class DeviceKind(StrEnum):
    """A kind of this machine's devices."""

    CPU = "cpu"
    CUDA = "cuda"


def main(
    kind: Annotated[DeviceKind, typer.Argument(help="Which of this machine's devices.")] = DeviceKind.CPU,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that will train together.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Measure again what is the target already.")] = False,
) -> None:
    """Measure this machine, and write artifacts/device.json, for which plans are made."""
    with one_sentence():
        root = find_root()
        if again:
            (root / DEVICE).unlink(missing_ok=True)
        among = ["--ranks", str(ranks)] if ranks > 1 else []
        code, said = run_quietly(python_command("stowage.stages.device", kind.value, *among), root)
        if code != 0:
            raise StowageError((said.splitlines() or ["it cannot be measured"])[-1].removeprefix("error: "))
        typer.echo(said.strip())


if __name__ == "__main__":
    run_command(main)

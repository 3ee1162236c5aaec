"""Plan the training step, then train under the plan.

python -m stowage.flows.train
python -m stowage.flows.train --set train.steps=20
prefect deployment run train/local --watch
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from stowage.flows.pipeline.chain import run_chain
from stowage.flows.pipeline.command import Assignments, one_sentence, overrides_of, run_command
from stowage.flows.pipeline.prefect_imports import flow
from stowage.flows.pipeline.project import TRAIN_STAGES
from stowage.flows.pipeline.results import RunResult, markdown


@flow(name="train")
def train(overrides: dict[str, Any] | None = None, root: Path | None = None) -> RunResult:
    """Plan and train as `params.yaml` says; arguments and errors as those of `plan`."""
    result: RunResult = run_chain(TRAIN_STAGES, overrides, root, "train")
    return result


def main(assignments: Assignments = None) -> None:
    """Plan the training step that params.yaml describes, and train under the plan."""
    with one_sentence():
        typer.echo(markdown(train(overrides_of(assignments))))


if __name__ == "__main__":
    run_command(main)

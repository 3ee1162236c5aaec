"""Plan the training step: trace, profile, partition, options, solve, codegen.

python -m stowage.flows.plan
python -m stowage.flows.plan --set solve.device_budget=900MiB
prefect deployment run plan/local -p 'overrides={"solve.device_budget": "900MiB"}' --watch
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from stowage.flows.pipeline.chain import run_chain
from stowage.flows.pipeline.command import Assignments, one_sentence, overrides_of, run_command
from stowage.flows.pipeline.prefect_imports import flow
from stowage.flows.pipeline.project import PLAN_STAGES
from stowage.flows.pipeline.results import RunResult, markdown


@flow(name="plan")
def plan(overrides: dict[str, Any] | None = None, root: Path | None = None) -> RunResult:
    """Plan the step that `params.yaml` describes.

    Args:
        overrides: parameters for this run only, by dotted key. The run then works in a Git worktree of its own, and
            its artifacts are copied to the folder that the result names; runs with different overrides may overlap.
        root: a folder of the project; the current folder by default.

    Raises:
        StowageError: a parameter is wrong, or a stage failed.
    """
    result: RunResult = run_chain(PLAN_STAGES, overrides, root, "plan")
    return result


def main(assignments: Assignments = None) -> None:
    """Plan the training step that params.yaml describes."""
    with one_sentence():
        typer.echo(markdown(plan(overrides_of(assignments))))


if __name__ == "__main__":
    run_command(main)

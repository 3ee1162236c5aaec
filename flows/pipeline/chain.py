"""Runs the chain of stages as Prefect tasks. Prefect orchestrates and caches nothing; DVC decides what is stale."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage.flows.pipeline.dvc import reproduce
from stowage.flows.pipeline.fan_out import solve_missing_blocks
from stowage.flows.pipeline.prefect_imports import (
    NO_CACHE,
    Completed,
    Failed,
    State,
    create_markdown_artifact,
    get_run_logger,
    task,
)
from stowage.flows.pipeline.project import find_root
from stowage.flows.pipeline.results import RunResult, collect, markdown
from stowage.flows.pipeline.task_runner import runner_of
from stowage.flows.pipeline.workspace import open_workspace
from stowage.stages.inputs import refresh
from stowage.stages.ir.code_record import renew_code
from stowage.stages.ir.errors import StowageError
from stowage.stages.settings import load_settings


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE)
def run_stage(root: Path, stage: str) -> State[None]:
    """Run one stage: `dvc repro --single-item`.

    An error that users can mend is a failed state, without a traceback.
    """
    try:
        reproduce(root, stage, _logger().info)
    except StowageError as error:
        return Failed(message=str(error), data=error)
    return Completed()


def run_chain(stages: Sequence[str], overrides: Mapping[str, Any] | None, root: Path | None, title: str) -> Any:
    """Run `stages` in order, in the project itself or, with overrides, in a worktree; the body of the flows.

    Returns:
        The result; for an error that users can mend a failed state, which raises that error when the flow is called.
    """
    try:
        return _run_chain(stages, overrides or {}, root, title)
    except StowageError as error:
        return Failed(message=str(error), data=error)


def _run_chain(stages: Sequence[str], overrides: Mapping[str, Any], root: Path | None, title: str) -> RunResult:
    logger = _logger()
    project = find_root(root)
    with open_workspace(project, overrides, logger.info) as workspace:
        settings = load_settings(workspace.root / "params.yaml")
        for sentence in (*renew_code(workspace.root), *refresh(workspace.root, settings)):
            logger.info(sentence)
        if "options" in stages:
            # Refuse a wrong task runner before the earlier stages run.
            runner_of(settings.options, 1)
        for stage in stages:
            if stage == "options":
                solve_missing_blocks(workspace.root, logger)
            run_stage(workspace.root, stage, return_state=True).result()
        result = collect(workspace, stages)
    summary = markdown(result)
    create_markdown_artifact(summary, key=f"stowage-{title}", description=f"What `{title}` found.")
    logger.info("Artifacts are in %s", result.folder)
    return result


def _logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    return get_run_logger()

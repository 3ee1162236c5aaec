"""Chooses where the tasks of a flow run: threads or processes of this machine, or a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stowage.flows.pipeline.prefect_imports import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.settings import OptionsSettings


@contextmanager
def started_runner(settings: OptionsSettings, at_once: int) -> Iterator[TaskRunner[Any]]:
    """Start the runner that `options.task_runner` names.

    Args:
        settings: section `options`.
        at_once: tasks at the same time on this machine; a cluster runs as many as its workers have threads.

    Raises:
        ParameterError: prefect-dask is not installed.
        StowageError: no Dask scheduler answers.
    """
    with runner_of(settings, at_once) as runner:
        if settings.task_runner == "dask":
            _connect(runner, settings.dask_scheduler)
        yield runner


def _connect(runner: Any, address: str | None) -> None:
    """Connect now: by itself the runner would with the first task."""
    try:
        assert runner.client is not None
    except OSError as error:
        raise StowageError(
            f"No Dask scheduler answers at {address}: start it with `dask scheduler` and its workers with "
            "`dask worker`, or correct options.dask_scheduler."
        ) from error


def runner_of(settings: OptionsSettings, at_once: int) -> TaskRunner[Any]:
    """Make the runner that `options.task_runner` names; arguments and errors are those of `started_runner`."""
    if settings.task_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=at_once)
    if settings.task_runner == "processes":
        return ProcessPoolTaskRunner(max_workers=at_once)
    try:
        from prefect_dask.task_runners import DaskTaskRunner
    except ImportError as error:
        raise ParameterError(
            "options.task_runner is dask, and prefect-dask is not installed: run `pip install prefect-dask`, or "
            "take threads or processes."
        ) from error
    return DaskTaskRunner(address=settings.dask_scheduler)

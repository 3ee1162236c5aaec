"""Imports Prefect, with defaults for closed networks and for a flow that starts a server of its own.

Prefect reads its settings when it is imported, so flows import it from here.
"""

from __future__ import annotations

import os

from stowage.flows.pipeline.extras import PIPELINE, require_extra

DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
require_extra("prefect", PIPELINE)

from prefect import flow, get_run_logger, task, unmapped  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.futures import as_completed  # noqa: E402
from prefect.states import Completed, Failed  # noqa: E402
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner  # noqa: E402

__all__ = [
    "NO_CACHE",
    "Completed",
    "Failed",
    "ProcessPoolTaskRunner",
    "State",
    "TaskRunner",
    "ThreadPoolTaskRunner",
    "as_completed",
    "create_markdown_artifact",
    "flow",
    "get_run_logger",
    "task",
    "unmapped",
]

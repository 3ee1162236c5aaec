"""What `prefect deployment run` does: a server, a work pool, a worker, and the deployments of `prefect.yaml`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pipeline_projects import run

from stowage.flows.compare import report
from stowage.flows.pipeline.project import stage_environment
from stowage.flows.plan import plan
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.table import read_record

pytestmark = pytest.mark.server

RUN = ("prefect", "deployment", "run", "--watch", "--watch-interval", "1")


@pytest.fixture(scope="module")
def served(tiny: Path, prefect_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a worker, started in the project's root, at the server of all tests."""
    from prefect.settings import PREFECT_API_URL

    home = tmp_path_factory.mktemp("prefect")
    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_WORKER_QUERY_SECONDS": "1"}
    run(["prefect", "work-pool", "create", "local-process", "--type", "process", "--overwrite"], tiny, **environment)
    run(["prefect", "--no-prompt", "deploy", "--all"], tiny, **environment)
    with (home / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            ["prefect", "worker", "start", "--pool", "local-process"],
            cwd=tiny,
            env={**stage_environment(tiny), **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield environment
    finally:
        worker.terminate()
        worker.wait(600)


@pytest.mark.long
def test_both_deployments_run_at_once(tiny: Path, served: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """One with overrides, and with blocks that miss in the store: they are tasks, and the project stays as it was."""
    overrides = {"options.seed": 7, "solve.device_budget": "85%"}
    with ThreadPoolExecutor() as threads:
        changed = threads.submit(run, [*RUN, "plan/local", "-p", "overrides=" + json.dumps(overrides)], tiny, **served)
        assert "Completed" in run([*RUN, "train/local"], tiny, **served)
        assert "Completed" in changed.result()
    assert "distinct blocks to solve" in Path(served["PREFECT_HOME"], "worker.log").read_text()
    planned = [path.parents[1] for path in (tiny / ".stowage" / "runs").glob("*/codegen/step.py")]
    (folder,) = (f for f in planned if "85%" in (f / "params.yaml").read_text())
    found, here = (read_record(f / "solve" / "summary.json", PlanSummary) for f in (folder, tiny / "artifacts"))
    assert found.device_budget_bytes > here.device_budget_bytes
    assert run(["git", "status", "--porcelain"], tiny) == ""
    assert json.loads(run(["dvc", "status", "--json"], tiny)) == {}
    assert "The trace is unchanged." in report(tiny, "HEAD", folder)

    caplog.clear()
    again = plan({"options.seed": 7, "solve.device_budget": "88%"}, root=tiny)
    assert again.folder.is_relative_to(tiny / ".stowage" / "runs")
    assert "distinct blocks to solve" not in caplog.text, "blocks that are in the store are not solved again"

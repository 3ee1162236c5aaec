"""What `prefect deployment run` does: a server, a work pool, a worker, and the deployments of `prefect.yaml`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_projects import run

from stowage.flows._project import stage_environment

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def served(tiny: Path, prefect_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a worker, started in the project's root, at the server of all tests."""
    from prefect.settings import PREFECT_API_URL

    home = tmp_path_factory.mktemp("prefect")
    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
    environment["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    run(["prefect", "work-pool", "create", "local-process", "--type", "process"], tiny, **environment)
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


def test_both_deployments_run(tiny: Path, served: dict[str, str]) -> None:
    overrides = "overrides=" + json.dumps({"solve.device_budget": "95%"})
    command = ["prefect", "deployment", "run", "plan/local", "-p", overrides, "--watch"]
    assert "Completed" in run(command, tiny, **served)
    folders = [path.parents[1] for path in (tiny / ".stowage" / "runs").glob("*/codegen/step.py")]
    assert any("95%" in (folder / "params.yaml").read_text() for folder in folders)
    assert "Completed" in run(["prefect", "deployment", "run", "train/local", "--watch"], tiny, **served)
    assert json.loads(run(["dvc", "status", "--json"], tiny)) == {}

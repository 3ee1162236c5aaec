"""What `prefect deployment run` does: a server, a work pool, a worker, and the deployments of `prefect.yaml`."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_projects import run

from stowage.flows._project import stage_environment

pytestmark = pytest.mark.server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment in which a server and a worker, started in the project's root, are at work."""
    home = tmp_path_factory.mktemp("prefect")
    address = f"http://127.0.0.1:{(port := free_port())}/api"
    environment = {"PREFECT_API_URL": address, "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
    environment["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"

    def start(*command: str) -> subprocess.Popen[bytes]:
        with (home / f"{command[0]}.log").open("wb") as log:
            return subprocess.Popen(
                ["prefect", *command],
                cwd=tiny,
                env={**stage_environment(tiny), **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    server = start("server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui")
    try:
        wait_for(f"{address}/health", 120)
        run(["prefect", "work-pool", "create", "local-process", "--type", "process"], tiny, **environment)
        run(["prefect", "--no-prompt", "deploy", "--all"], tiny, **environment)
        worker = start("worker", "start", "--pool", "local-process")
        try:
            yield environment
        finally:
            worker.terminate()
            worker.wait(60)
    finally:
        server.terminate()
        server.wait(60)


def test_both_deployments_run(tiny: Path, served: dict[str, str]) -> None:
    overrides = "overrides=" + json.dumps({"solve.device_budget": "95%"})
    command = ["prefect", "deployment", "run", "plan/local", "-p", overrides, "--watch"]
    assert "Completed" in run(command, tiny, **served)
    folders = [path.parents[1] for path in (tiny / ".stowage" / "runs").glob("*/codegen/step.py")]
    assert any("95%" in (folder / "params.yaml").read_text() for folder in folders)
    assert "Completed" in run(["prefect", "deployment", "run", "train/local", "--watch"], tiny, **served)
    assert json.loads(run(["dvc", "status", "--json"], tiny)) == {}

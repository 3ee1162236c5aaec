"""Anyone's repository with the wheel installed: init, DVC, a deployment, a comparison, an experiment, an upgrade."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import Installed
from pipeline_projects import set_parameters

from stowage.flows.pipeline.project import TRAIN_STAGES
from stowage.stages.ir.code_record import RECORD
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_record, read_rows

pytestmark = pytest.mark.server

QUICK = {
    "profile": {"seconds_per_call": 0.001, "min_samples": 1},
    "options": {"peak_budgets": 2, "save_budgets": 2, "time_limit_s": 0.1, "workers": 1},
    "solve": {"memory_slots": 100},
    "train": {"steps": 3, "checkpoint_every": 2, "measure_every": 1},
}


def ran(output: str) -> list[str]:
    """Stages whose command `dvc repro` really ran."""
    return [stage for stage in TRAIN_STAGES if f"Running stage '{stage}'" in output]


def commit(installed: Installed, folder: Path) -> None:
    """Commit everything that is not ignored."""
    installed.run(["git", "add", "--all"], folder)
    installed.run(["git", "commit", "--quiet", "--allow-empty", "--message", "A change"], folder)


@pytest.fixture(scope="module")
def repository(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with nothing of Stowage's but what `stowage init` and `dvc repro` made."""
    folder = tmp_path_factory.mktemp("theirs") / "their-project"
    folder.mkdir()
    installed.run(["git", "init", "--quiet", "--initial-branch", "main"], folder)
    said = installed.run(["stowage", "init", "--model", "my_model:build", "--device", "cpu"], folder)
    for name in ("my_model.py", "params.yaml", "dvc.yaml", "prefect.yaml", ".gitignore", str(RECORD)):
        assert f"wrote {name}" in said
        assert (folder / name).is_file()
    set_parameters(folder, QUICK)
    commit(installed, folder)
    assert ran(installed.run(["dvc", "repro"], folder)) == list(TRAIN_STAGES)
    commit(installed, folder)
    return folder


def test_the_plan_is_made_by_the_wheel_and_keeps_the_numbers_of_plain_pytorch(
    repository: Path, installed: Installed
) -> None:
    where = installed.run([installed.python, "-c", "import stowage; print(stowage.__file__)"], repository)
    assert Path(where.strip()).is_relative_to(installed.folder)
    summary = read_record(repository / "artifacts" / "solve" / "summary.json", PlanSummary)
    assert summary.device_peak_bytes <= summary.device_budget_bytes < summary.keep_all_peak_bytes
    steps = read_rows(repository / "artifacts" / "train" / "steps.parquet", StepRecord)
    assert len(steps) == 3
    assert [step.loss for step in steps] == [step.eager_loss for step in steps]
    assert len({step.loss for step in steps}) == 3
    assert json.loads(installed.run(["dvc", "status", "--json"], repository)) == {}
    assert "equal plain PyTorch's" in installed.run(["stowage", "show"], repository)


def test_init_again_changes_nothing(repository: Path, installed: Installed) -> None:
    said = installed.run(["stowage", "init"], repository)
    assert len(said.splitlines()) == 1, said
    assert installed.run(["git", "status", "--porcelain"], repository) == ""


def test_an_edit_that_leaves_the_step_as_it_is_runs_tracing_and_training_alone(
    repository: Path, installed: Installed
) -> None:
    model = repository / "my_model.py"
    model.write_text(model.read_text().replace("replace it by yours", "replaced by mine"))
    assert list(json.loads(installed.run(["dvc", "status", "--json"], repository))) == ["trace", "train"]
    assert ran(installed.run(["dvc", "repro"], repository)) == ["trace", "train"]
    commit(installed, repository)


def test_an_experiment_with_another_budget_solves_again(repository: Path, installed: Installed) -> None:
    said = installed.run(["dvc", "exp", "run", "--set-param", "solve.device_budget=70%"], repository)
    assert ran(said) == ["solve", "codegen", "train"]
    changed = installed.run(["stowage", "compare", "--before", "HEAD"], repository)
    assert "| predicted peak |" in changed
    assert "The trace is unchanged." in changed
    installed.run(["git", "checkout", "--quiet", "."], repository)
    installed.run(["dvc", "checkout", "--quiet"], repository)
    assert json.loads(installed.run(["dvc", "status", "--json"], repository)) == {}


@pytest.fixture
def served(repository: Path, installed: Installed, prefect_home: None, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a worker, started in the repository, at the server of all tests."""
    from prefect.settings import PREFECT_API_URL

    environment = {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    pool = ["prefect", "work-pool", "create", "local-process", "--type", "process", "--overwrite"]
    installed.run(pool, repository, **environment)
    installed.run(["prefect", "--no-prompt", "deploy", "--all"], repository, **environment)
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            ["prefect", "worker", "start", "--pool", "local-process"],
            cwd=repository,
            env=installed.environment(**environment),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield environment
    finally:
        worker.terminate()
        worker.wait(600)


def test_the_deployment_runs_there(repository: Path, installed: Installed, served: dict[str, str]) -> None:
    call = ["prefect", "deployment", "run", "--watch", "--watch-interval", "1", "plan/local", "-p"]
    said = installed.run([*call, 'overrides={"solve.device_budget": "80%"}'], repository, **served)
    assert "Completed" in said, Path(served["PREFECT_HOME"], "worker.log").read_text()
    (folder,) = (path.parents[1] for path in (repository / ".stowage" / "runs").glob("*/solve/summary.json"))
    found, here = (read_record(f / "solve" / "summary.json", PlanSummary) for f in (folder, repository / "artifacts"))
    assert found.device_budget_bytes > here.device_budget_bytes
    assert installed.run(["git", "status", "--porcelain"], repository) == ""
    assert "| budget |" in installed.run(["stowage", "compare", "--before", str(folder)], repository)


def test_an_upgrade_makes_stale_the_stages_whose_code_changed(repository: Path, installed: Installed) -> None:
    edited = installed.package / "stages" / "partition" / "blocks.py"
    text = edited.read_text()
    stage = [installed.python, "-m", "stowage.stages.partition"]
    try:
        edited.write_text(text + "\n# Another release.\n")
        said = installed.run(["stowage", "init"], repository)
        assert said.splitlines()[0].endswith(": partition")
        assert list(json.loads(installed.run(["dvc", "status", "--json"], repository))) == ["partition"]
        assert ran(installed.run(["dvc", "repro"], repository)) == ["partition"]
        edited.write_text(text + "\n# And another.\n")
        done = installed.start(stage, repository)
        assert done.returncode == 1, "what DVC was not told of is not run"
        assert "it now says so for partition; run the same command again." in done.stderr
        installed.run(stage, repository)
    finally:
        edited.write_text(text)
    installed.run(["git", "checkout", "--quiet", "."], repository)

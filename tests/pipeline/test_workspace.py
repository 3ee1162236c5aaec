"""DVC as flows use it, and the workspaces that they use it in, on a toy project."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
from pipeline_projects import commit, run, set_parameters

from stowage.flows.pipeline import dvc as _dvc
from stowage.flows.pipeline.dvc import StageFailedError, changed_stages, reproduce
from stowage.flows.pipeline.git import git, snapshot
from stowage.flows.pipeline.overrides import parse_assignments
from stowage.flows.pipeline.project import find_root, stage_environment
from stowage.flows.pipeline.workspace import open_workspace
from stowage.stages.ir.errors import ParameterError, StowageError

BUDGET = {"solve.device_budget": "900MiB"}


def runs(root: Path) -> list[str]:
    """Stages that really ran, from a store that every workspace shares."""
    path = root / ".stowage" / "costs" / "runs.txt"
    return path.read_text().split() if path.exists() else []


def reproduce_both(root: Path) -> None:
    for stage in ("trace", "solve"):
        reproduce(root, stage, print)


def test_a_second_run_does_nothing(toy: Path) -> None:
    reproduce_both(toy)
    reproduce_both(toy)
    assert runs(toy) == ["trace", "solve"]
    assert changed_stages(toy, ["solve"]) == {}


def test_a_failing_stage_is_its_own_sentence(toy: Path) -> None:
    set_parameters(toy, {"trace": {"seed": 13}})
    lines: list[str] = []
    with pytest.raises(StageFailedError, match=r"^Stage trace failed: Thirteen is not a seed: choose another\.$"):
        reproduce(toy, "trace", lines.append)
    assert any("Running stage" in line for line in lines)


def test_a_parameter_that_dvc_misses_is_named_with_what_adds_it(toy: Path) -> None:
    """DVC follows keys of `params.yaml`, and runs no stage that lacks one."""
    path = toy / "params.yaml"
    path.write_text(path.read_text().replace("seed:", "sead:"))
    said = r"^Stage trace failed: Parameters 'trace\.seed' are missing from 'params\.yaml': `stowage init` adds them\.$"
    with pytest.raises(StageFailedError, match=said):
        reproduce(toy, "trace", print)


def test_without_overrides_the_project_itself_is_used(toy: Path) -> None:
    with open_workspace(toy, {}, print) as workspace:
        assert workspace.root == toy
        assert not workspace.temporary


def test_overrides_work_in_a_worktree_and_leave_the_project_alone(toy: Path) -> None:
    reproduce_both(toy)
    commit(toy, "Run")
    before = git(toy, "status", "--porcelain"), (toy / "dvc.lock").read_bytes(), (toy / "params.yaml").read_bytes()
    with open_workspace(toy, BUDGET, print) as workspace:
        assert workspace.root.parent == toy / ".worktrees"
        reproduce_both(workspace.root)
        assert json.loads((workspace.root / "artifacts/solve/value.json").read_text()) == {"device_budget": "900MiB"}
    assert runs(toy) == ["trace", "solve", "solve"], "trace comes from the shared cache"
    assert not workspace.root.exists()
    assert len(git(toy, "worktree", "list").splitlines()) == 1
    after = git(toy, "status", "--porcelain"), (toy / "dvc.lock").read_bytes(), (toy / "params.yaml").read_bytes()
    assert after == before
    with open_workspace(toy, BUDGET, print) as workspace:
        reproduce_both(workspace.root)
    assert len(runs(toy)) == 3, "the same overrides again come from the shared cache"


def test_a_worktree_has_uncommitted_edits_and_new_code(toy: Path) -> None:
    set_parameters(toy, {"trace": {"seed": 5}})
    (toy / "my_model.py").write_text("size = 1\n")
    index = git(toy, "diff", "--cached")
    with open_workspace(toy, BUDGET, print) as workspace:
        reproduce_both(workspace.root)
        assert json.loads((workspace.root / "artifacts/trace/value.json").read_text())["seed"] == 5
        assert (workspace.root / "my_model.py").is_file()
    assert git(toy, "diff", "--cached") == index


def test_a_worktree_of_a_repository_without_a_commit(toy: Path) -> None:
    shutil.rmtree(toy / ".git")
    git(toy, "init", "--quiet")
    (toy / "other.py").write_text("size = 1\n")
    with open_workspace(toy, BUDGET, print) as workspace:
        reproduce_both(workspace.root)
        assert json.loads((workspace.root / "artifacts/solve/value.json").read_text()) == {"device_budget": "900MiB"}
        assert (workspace.root / "other.py").is_file()
    assert not git(toy, "status", "--porcelain", "--", "params.yaml").startswith("A")


def test_a_worktree_has_the_projects_files_that_nobody_has_committed(toy: Path) -> None:
    (toy / ".gitignore").write_text((toy / ".gitignore").read_text() + "/params.yaml\n")
    git(toy, "rm", "--quiet", "--cached", "params.yaml", "dvc.yaml")
    commit(toy, "Without them")
    (toy / "artifacts").mkdir(exist_ok=True)
    (toy / "artifacts" / "device.json").write_text("{}")
    with open_workspace(toy, BUDGET, print) as workspace:
        assert {"params.yaml", "dvc.yaml", "artifacts/device.json"} <= {
            str(path.relative_to(workspace.root)) for path in workspace.root.rglob("*") if path.is_file()
        }
    with pytest.raises(StowageError, match="not a git repository"):
        snapshot(toy.parent)


def test_inputs_that_git_ignores_are_there(toy: Path) -> None:
    (toy / ".gitignore").write_text((toy / ".gitignore").read_text() + "/corpus.txt\n")
    (toy / "corpus.txt").write_text("words")
    with open_workspace(toy, {"train.data.source": "corpus.txt"}, print) as workspace:
        assert (workspace.root / "corpus.txt").read_text() == "words"


def test_what_another_process_was_writing_is_tried_again(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC's cache of runs is shared by all worktrees, and it lists files that are half written there."""
    missing = "ERROR: [Errno 2] No such file or directory: "
    lines = [f"{missing}'{toy}/.dvc/cache/runs/9f/9f82/.Ei6.tmp'", f"{missing}'toy.py'"]
    answers, said = iter(lines), list[str]()
    monkeypatch.setattr(_dvc, "_stream", lambda *_: (1, deque([next(answers)])))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(StageFailedError, match=r"toy\.py"):
        reproduce(toy, "trace", said.append)
    assert [text for text in said if "trying again" in text]


def test_different_overrides_may_overlap(toy: Path) -> None:
    with (
        open_workspace(toy, BUDGET, print) as one,
        open_workspace(toy, {"solve.device_budget": "800MiB"}, print) as two,
    ):
        assert one.root != two.root
        threads = [threading.Thread(target=reproduce_both, args=[w.root]) for w in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        values = [json.loads((w.root / "artifacts/solve/value.json").read_text()) for w in (one, two)]
    assert values == [{"device_budget": "900MiB"}, {"device_budget": "800MiB"}]


def test_a_failed_run_leaves_no_worktree_and_an_interrupted_one_goes_on_in_its_own(toy: Path) -> None:
    with pytest.raises(RuntimeError), open_workspace(toy, BUDGET, print) as workspace:
        raise RuntimeError
    assert not workspace.root.exists()
    with contextlib.suppress(KeyboardInterrupt), open_workspace(toy, BUDGET, print) as workspace:
        (workspace.root / ".stowage" / "checkpoint").write_text("half way")
        raise KeyboardInterrupt
    with open_workspace(toy, BUDGET, print) as again:
        assert again.root == workspace.root
        assert (again.root / ".stowage" / "checkpoint").read_text() == "half way"
        reproduce_both(again.root)
    assert not again.root.exists()


def test_wrong_overrides_change_nothing(toy: Path) -> None:
    with (
        pytest.raises(
            ParameterError, match=r"solve\.device_budgt is not a known key; rename it to solve\.device_budget"
        ),
        open_workspace(toy, {"solve.device_budgt": 1}, print),
    ):
        pass
    assert not (toy / ".worktrees").exists()


def test_one_run_at_a_time_in_the_project_itself(toy: Path) -> None:
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with open_workspace(toy, {}, said.append):
            order.append("second")

    with open_workspace(toy, {}, print):
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 600
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting for it" in said[0]


def test_stopping_a_flow_stops_the_stage(toy: Path) -> None:
    """DVC killed by itself would leave the stage running."""
    (toy / "toy.py").write_text("import time, os; open('pid', 'w').write(str(os.getpid())); time.sleep(1000)")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path; "
        f"from stowage.flows.pipeline.dvc import reproduce; reproduce(Path({str(toy)!r}), 'trace', print)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=stage_environment(find_root(Path(__file__))))
    pid = toy / "pid"
    deadline = time.monotonic() + 600
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(600)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


def test_assignments() -> None:
    assert parse_assignments(["solve.device_budget=900MiB", "train.steps=3", "trace.loss=null", "a.b=1e-4"]) == {
        "solve.device_budget": "900MiB",
        "train.steps": 3,
        "trace.loss": None,
        "a.b": 1e-4,
    }
    with pytest.raises(ParameterError, match="not an assignment"):
        parse_assignments(["train.steps"])
    with pytest.raises(ParameterError, match="not valid YAML"):
        parse_assignments(["train.steps=["])


def test_outside_a_project(tmp_path: Path) -> None:
    with pytest.raises(StowageError, match="is not inside a Stowage project"):
        find_root(tmp_path)


def test_commands_end_with_the_sentence(toy: Path) -> None:
    set_parameters(toy, {"trace": {"seed": -1}})
    done = subprocess.run(
        [sys.executable, "-m", "stowage.flows.compare", "--before", "nowhere"],
        cwd=toy,
        env=stage_environment(find_root(Path(__file__))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    run(["git", "status"], toy)

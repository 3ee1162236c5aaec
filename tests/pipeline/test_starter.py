"""`stowage init`: which model is meant, and one text out of what is there and what is wanted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_projects import ROOT, run

from stowage.flows.pipeline import project
from stowage.flows.starter import start as starting
from stowage.flows.starter.answers import Model, choose_model, model_of
from stowage.flows.starter.changes import changes_of
from stowage.flows.starter.merge import with_deployments, with_keys, with_lines, with_sections, with_stages
from stowage.flows.starter.repository import ignored_by_git
from stowage.flows.starter.start import start
from stowage.flows.starter.templates import WORKFLOW, parameters, template, workflow
from stowage.stages.ir.code_record import RECORD, read_code, record_code, require_recorded
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.settings import load_settings, parse_settings
from stowage.version import __version__

MODEL = Model("callable", "my_model:build")


def no_answer(question: str, default: str) -> str:
    raise AssertionError("nobody is asked")


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Git repository; DVC is initialised and the device measured by stand-ins that take no time."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    run(["git", "init", "--quiet"], folder)
    monkeypatch.setattr(starting, "_measure", lambda root, kind, say: (root / "artifacts").mkdir(exist_ok=True))
    monkeypatch.setattr(starting, "start_dvc", lambda root, folder: None)
    return folder


def started(folder: Path, model: str | None = "my_model:build", dry: bool = False) -> list[str]:
    said: list[str] = []
    start(folder, model=model, device="cpu", dry=dry, say=said.append, ask=no_answer)
    return said


def files(folder: Path) -> dict[str, str]:
    names = subprocess.run(["git", "ls-files", "--others"], cwd=folder, capture_output=True, text=True, check=True)
    return {name: (folder / name).read_text() for name in names.stdout.splitlines()}


def test_what_a_model_may_be(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert model_of("pkg.mine:build", tmp_path) == Model("callable", "pkg.mine:build")
    assert model_of("weights", tmp_path) == Model("directory", "weights")
    assert model_of("gpt2", tmp_path) == Model("architecture", "gpt2")
    with pytest.raises(ParameterError, match="is neither `module:function`, nor"):
        model_of("no/such/folder", tmp_path)


def test_the_model_is_asked_for_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StowageError, match=r"give `--model my_model:build`"):
        choose_model(None, tmp_path, no_answer)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)}))
    assert choose_model(None, tmp_path, lambda question, default: " bert ") == Model("architecture", "bert")
    (tmp_path / "my_model.py").write_text("def build(): ...")
    assert choose_model(None, tmp_path, no_answer) == MODEL


@pytest.mark.parametrize("model", [MODEL, Model("architecture", "gpt2"), Model("directory", "weights")])
@pytest.mark.parametrize("data", [None, "my_model:batches"])
def test_short_parameters_are_right(model: Model, data: str | None) -> None:
    text = parameters(model, "cpu", data)
    settings = parse_settings(yaml.safe_load(text))
    assert getattr(settings.trace.model, model.kind) == model.value
    assert settings.train.data.callable == data
    assert len(text.splitlines()) < 45


def test_nothing_is_written_twice_and_the_second_time_nothing_at_all(theirs: Path) -> None:
    said = started(theirs)
    assert [line for line in said if "my_model.py" in line] == [
        "wrote my_model.py",
        "dvc.yaml now names my_model.py among the deps of trace.",
        "dvc.yaml now names my_model.py among the deps of train.",
    ]
    before = files(theirs)
    assert {"params.yaml", "dvc.yaml", "prefect.yaml", WORKFLOW, str(RECORD), "artifacts/inputs.yaml"} <= before.keys()
    assert started(theirs, model=None) == [starting.NEXT]
    assert files(theirs) == before


def cached_outputs(pipeline: dict[str, Any]) -> set[str]:
    """Patterns of what DVC keeps in its cache; what it keeps in Git has `cache: false`."""
    stages = [pipeline["stages"][name] for name in project.TRAIN_STAGES]
    outputs = [o for s in stages for kind in ("outs", "metrics", "plots") for o in s.get(kind, [])]
    return {f"/{o}" for o in outputs if isinstance(o, str)}


def test_a_dry_run_writes_nothing(theirs: Path) -> None:
    assert "would have: wrote my_model.py" in started(theirs, dry=True)
    assert files(theirs) == {}


def test_git_keeps_what_the_cache_does_not(theirs: Path) -> None:
    started(theirs)
    pipeline = yaml.safe_load((theirs / "dvc.yaml").read_text())
    ignored = [output.removeprefix("/") for output in cached_outputs(pipeline)]
    assert ignored_by_git(theirs, ignored) == ignored
    kept = [f"artifacts/{path}/metrics.json" for path in ("profile", "train")] + ["artifacts/solve/summary.json"]
    assert ignored_by_git(theirs, [*kept, "artifacts/device.json", "artifacts/.gitignore", "dvc.lock"]) == []


def test_what_is_there_stays_and_what_is_added_is_shown(theirs: Path) -> None:
    (theirs / ".gitignore").write_text("*.log\n__pycache__\n")
    (theirs / "dvc.yaml").write_text(
        "stages:\n  featurize:   # ours\n    cmd: python featurize.py\n    outs:\n    - features\n"
    )
    (theirs / "prefect.yaml").write_text("name: theirs\ndeployments:\n- name: nightly\n  entrypoint: jobs.py:run\n")
    (theirs / "my_model.py").write_text("def build():\n    ...\n")
    (theirs / "params.yaml").write_text("featurize:\n  columns: 3  # of ours\n")
    said = "\n".join(started(theirs))
    assert "updated .gitignore:\n    +.stowage/\n    +.worktrees/\n    +/artifacts/origin.json\n" in said
    lines = (theirs / ".gitignore").read_text().splitlines()
    assert lines[:4] == ["*.log", "__pycache__", ".stowage/", ".worktrees/"]
    assert set(lines[4:]) == cached_outputs(yaml.safe_load((theirs / "dvc.yaml").read_text()))
    pipeline = yaml.safe_load((theirs / "dvc.yaml").read_text())["stages"]
    assert list(pipeline) == ["featurize", *project.TRAIN_STAGES]
    assert "featurize:   # ours" in (theirs / "dvc.yaml").read_text()
    names = [d["name"] for d in yaml.safe_load((theirs / "prefect.yaml").read_text())["deployments"]]
    assert names == ["nightly", "local", "local"]
    text = (theirs / "params.yaml").read_text()
    assert text.startswith("featurize:\n  columns: 3  # of ours\n")
    assert load_settings(theirs / "params.yaml").trace.model.callable == "my_model:build"
    assert (theirs / "my_model.py").read_text() == "def build():\n    ...\n"
    assert "callable: my_model:batches" not in "".join(
        line for line in (theirs / "params.yaml").read_text().splitlines() if not line.strip().startswith("#")
    )


def test_an_update_keeps_what_people_added_to_our_stages(theirs: Path) -> None:
    started(theirs)
    pipeline = theirs / "dvc.yaml"
    text = pipeline.read_text().replace("      - my_model.py\n", "      - my_model.py\n      - data/rows.csv\n", 1)
    pipeline.write_text(text.replace("desc: Record one training step", "desc: An older text for one training step"))
    assert any(line.startswith("updated dvc.yaml") for line in started(theirs))
    stage = yaml.safe_load(pipeline.read_text())["stages"]["trace"]
    assert {"my_model.py", "data/rows.csv", "artifacts/device.json"} == set(stage["deps"])
    assert stage["desc"].startswith("Record one")


def test_an_edited_workflow_is_left_and_an_unedited_one_is_renewed(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(theirs)
    (theirs / "requirements.txt").write_text("torchvision\n")
    assert any(line.startswith(f"updated {WORKFLOW}") for line in started(theirs))
    assert "pip install -r requirements.txt" in (theirs / WORKFLOW).read_text()
    edited = (theirs / WORKFLOW).read_text().replace("ubuntu-latest", "self-hosted")
    (theirs / WORKFLOW).write_text(edited)
    (theirs / "pyproject.toml").write_text("")
    assert any(f"left {WORKFLOW} as it is, because it was edited" in line for line in started(theirs))
    assert (theirs / WORKFLOW).read_text() == edited


def test_a_source_layout(theirs: Path) -> None:
    (theirs / "src" / "pkg").mkdir(parents=True)
    (theirs / "src" / "pkg" / "__init__.py").write_text("")
    started(theirs, "pkg.nets:make")
    assert "def make()" in (theirs / "src" / "pkg" / "nets.py").read_text()
    stages = yaml.safe_load((theirs / "dvc.yaml").read_text())["stages"]
    assert "src/pkg/nets.py" in stages["trace"]["deps"]
    assert yaml.safe_load((theirs / "params.yaml").read_text())["train"]["data"] == {"callable": "pkg.nets:batches"}


def test_a_folder_of_a_repository_has_its_workflow_at_the_top(theirs: Path) -> None:
    inside = theirs / "planning"
    inside.mkdir()
    started(inside)
    content = yaml.safe_load((theirs / ".github" / "workflows" / "stowage-planning.yml").read_text())
    assert content["jobs"]["plan"]["defaults"]["run"]["working-directory"] == "planning"
    assert "planning/params.yaml" in content[True]["pull_request"]["paths"]  # YAML reads `on` as a truth value


def refused(folder: Path, match: str, model: str | None = "my_model:build") -> None:
    before = files(folder)
    with pytest.raises(StowageError, match=match):
        started(folder, model)
    assert files(folder) == before


def test_what_is_in_the_way_is_said_and_nothing_is_written(theirs: Path, tmp_path: Path) -> None:
    (theirs / "my_model.py").write_text("def other(): ...")
    refused(theirs, "my_model.py has no function build: write one")
    (theirs / "my_model.py").write_text("def build(:")
    refused(theirs, "cannot be read as Python")
    (theirs / "my_model.py").write_text("def build(): ...")
    (theirs / "dvc.yaml").write_text("stages:\n  train:\n    cmd: python train.py\n")
    refused(theirs, "has a stage train of its own")
    (theirs / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    refused(theirs, "belongs to a checkout of Stowage itself")
    (theirs / "dvc.yaml").unlink()
    (theirs / "params.yaml").write_text("trace:\n  model: {architecture: gpt2}\n")
    refused(theirs, r"params.yaml names another model than my_model:build: change trace.model there")
    (theirs / "params.yaml").unlink()
    (theirs / ".gitignore").write_text("artifacts/\n")
    refused(theirs, r"Git ignores artifacts/device.json, .*which must be committed")
    with pytest.raises(StowageError, match="is in no Git repository: run `git init`"):
        started(tmp_path)
    with pytest.raises(StowageError, match="is a checkout of Stowage itself"):
        started(ROOT)


def test_a_misplaced_pipeline_is_said_to_be_that(theirs: Path) -> None:
    for name in ("dvc.yaml", "params.yaml"):
        (theirs / name).write_text((ROOT / name).read_text())
    with pytest.raises(StowageError, match=r"belongs to a checkout of Stowage itself, .* run `stowage init`"):
        project.find_root(theirs)
    (theirs / "stages").mkdir()
    assert project.stage_environment(theirs).get("PYTHONPATH") == os.environ.get("PYTHONPATH"), "a folder of that name"
    assert not (theirs / "build").exists()


@pytest.mark.parametrize("theirs", ["plots:\n  - mine.csv\n", "plots:\n  mine.csv:\n    x: a\n", ""])
def test_plots_of_their_own_stay(theirs: str) -> None:
    wanted = template("dvc.yaml")
    found = yaml.safe_load(with_stages(theirs, wanted, "dvc.yaml"))["plots"]
    names = (
        [*found] if isinstance(found, dict) else [item if isinstance(item, str) else next(iter(item)) for item in found]
    )
    assert names == [*(["mine.csv"] if theirs else []), "loss", "step_time", "memory"]


def test_merging_is_idempotent() -> None:
    stages = template("dvc.yaml")
    assert with_stages(stages, stages, "dvc.yaml") == stages
    assert with_lines("a\n", "/a/\n") == "a\n"
    text = parameters(MODEL, "cpu", None)
    assert with_sections(text, text, "params.yaml") == text
    short = "trace:\n  model: {callable: 'my_model:build'}\n"
    assert yaml.safe_load(with_sections(short, text, "params.yaml")).keys() == yaml.safe_load(text).keys()
    wanted = template("prefect.yaml", name="x")
    assert with_deployments(wanted, wanted, "prefect.yaml") == wanted


@pytest.mark.parametrize(
    "theirs",
    [
        "trace: {seed: 1}\nsolve:\n    # ours\n    device_budget: 40%   # of plain\n    gap: ~\n",
        "solve: {device_budget: 40%}\n",
        "solve:\n",
        "solve: {}\n",
        "",
        "solve:\n  freeze: {rate: 0.5}\n",
    ],
)
def test_keys_that_dvc_follows_are_there_and_all_else_stays(theirs: str) -> None:
    """`dvc repro` ends with an error where a key that a stage tracks is missing."""
    wanted = parameters(MODEL, "cpu", None)
    found = with_keys(theirs, wanted, template("dvc.yaml"), "params.yaml")
    before, after = yaml.safe_load(theirs) or {}, yaml.safe_load(found)
    assert after["solve"] == {"freeze": None, **(before.get("solve") or {})}
    assert {**after, "solve": None} == {**before, "solve": None}
    assert with_keys(found, wanted, template("dvc.yaml"), "params.yaml") == found
    if "# ours" in theirs:
        assert [line for line in found.splitlines() if "freeze" not in line] == theirs.splitlines()
    with pytest.raises(StowageError, match=r"solve in params\.yaml is not a mapping"):
        with_keys("solve: 3\n", wanted, template("dvc.yaml"), "params.yaml")


def test_a_new_project_follows_freezing_alone_where_it_traces() -> None:
    """Another budget does not trace again."""
    tracked = yaml.safe_load(template("dvc.yaml"))["stages"]["trace"]["params"]
    assert {"lossy", "solve.freeze", "trace"} == {key for key in tracked if isinstance(key, str)}


def test_the_workflow_installs_the_package(tmp_path: Path) -> None:
    steps = yaml.safe_load(workflow(tmp_path, ".", "1.2.3"))["jobs"]["plan"]["steps"]
    said = [step["run"] for step in steps if "run" in step]
    assert said[0] == "pip install 'stowage[pipeline]==1.2.3'"
    assert '[ -n "$(dvc remote list)" ]' in said[1]
    assert said[2] == 'stowage compare --before "$BASE" --replan --markdown "$GITHUB_STEP_SUMMARY"'


def test_the_record_says_which_stages_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "artifacts").mkdir()
    assert record_code(tmp_path, __version__) == list(project.TRAIN_STAGES)
    assert record_code(tmp_path, __version__) == []
    require_recorded(tmp_path, "trace")
    record = read_code(tmp_path)
    assert record is not None
    stale = {**record, "package": "other", "stages": {**record["stages"], "solve": "other"}}
    path = tmp_path / RECORD
    path.write_text(json.dumps(stale))
    with pytest.raises(StowageError, match="it now says so for solve; run the same command again"):
        require_recorded(tmp_path, "solve")
    assert read_code(tmp_path) == record
    path.write_text("{}")
    with pytest.raises(StowageError, match=r"stowage.json is damaged: delete it"):
        read_code(tmp_path)


def test_changes_are_known_before_anything_is_written(tmp_path: Path) -> None:
    found, left = changes_of(tmp_path, MODEL, "cpu", ".", "1.0", {})
    assert not left
    assert [str(change.path) for change in found][:3] == ["my_model.py", "params.yaml", "dvc.yaml"]
    assert list(tmp_path.iterdir()) == []

"""Files that the model and data are made of: which they are, and that DVC sees an edit of each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_projects import ROOT, TINY, commit, run, set_parameters

from stowage.flows.pipeline.dvc import changed_stages, reproduce
from stowage.flows.pipeline.project import import_path, stage_environment
from stowage.flows.pipeline.workspace import open_workspace
from stowage.stages.inputs import LIST, added_inputs, imported_files, listed_inputs, mend, recorded, refresh
from stowage.stages.inputs.listing import write_inputs
from stowage.stages.settings import Settings, load_settings

NOTHING: dict[str, list[str]] = {"trace": [], "train": []}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def settings_of(data: dict[str, str] | None = None, **trace: Any) -> Settings:
    model = {"model": {"architecture": "gpt2"}}
    return Settings.model_validate({"trace": model | trace, "train": {"data": data or {}}})


# --- which files


RECORD = """
import json, sys
from pathlib import Path
from stowage.stages.inputs import ExecutedFiles, imported_files, look_in_src
executed = ExecutedFiles()
look_in_src(Path())
import my_model, plugin
my_model.forward()
print(json.dumps(sorted(imported_files(Path(), executed.paths))))
"""


def test_deps_that_people_added_are_data_of_theirs(tmp_path: Path) -> None:
    assert added_inputs(tmp_path, "train") == set()
    for name in ("rows.csv", "my_model.py", "artifacts/trace", "artifacts/codegen"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    deps = ["rows.csv", "my_model.py", "artifacts/trace", str(ROOT / "stages" / "ir"), "gone.csv"]
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"train": {"cmd": "true", "deps": deps}}}))
    (tmp_path / "artifacts" / "inputs.yaml").write_text("trace: []\ntrain: [my_model.py]\n")
    assert added_inputs(tmp_path, "train") == {"rows.csv"}
    assert added_inputs(tmp_path, "trace") == set()


def test_every_file_of_the_users_is_recorded(tmp_path: Path) -> None:
    """Imported by an import, late, relatively, out of `src`, of a namespace package, by path; not the libraries'."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    by_path = (
        "import importlib.util as u; s = u.spec_from_file_location('x', 'parts/by_path.py'); "
        "s.loader.exec_module(u.module_from_spec(s)); exec(compile(open('parts/run.py').read(), "
        "__import__('os').path.abspath('parts/run.py'), 'exec'))"
    )
    write(
        project,
        {
            "my_model.py": f"import layers, mypkg.blocks, torch_free\n{by_path}\ndef forward():\n    import late",
            "layers.py": "",
            "late.py": "",
            "unused.py": "",
            "src/mypkg/__init__.py": "",
            "src/mypkg/blocks.py": "from . import heads\nfrom namespace import inner",
            "src/mypkg/heads.py": "",
            "namespace/inner.py": "",
            "parts/by_path.py": "",
            "parts/run.py": "",
            ".venv/lib/site-packages/torch_free.py": "",
        },
    )
    write(elsewhere, {"plugin.py": "import installed", "site-packages/installed.py": ""})
    environment = stage_environment(ROOT)
    more = [elsewhere, elsewhere / "site-packages", project / ".venv/lib/site-packages"]
    environment["PYTHONPATH"] = ":".join([environment["PYTHONPATH"], *map(str, more)])
    said = subprocess.run(
        [sys.executable, "-c", RECORD], cwd=project, env=environment, capture_output=True, text=True, check=True
    )
    names = ["late.py", "layers.py", "my_model.py", "namespace/inner.py", "parts/by_path.py", "parts/run.py"]
    package = ["src/mypkg/__init__.py", "src/mypkg/blocks.py", "src/mypkg/heads.py"]
    assert json.loads(said.stdout) == sorted([str(elsewhere / "plugin.py"), *names, *package])


def test_an_editable_install_of_the_project_is_the_checkouts_own_file(tmp_path: Path) -> None:
    """Runs with overrides import it from the project; an edit since is another file, and named as such."""
    checkout = tmp_path / "project" / ".worktrees" / "key"
    for folder in (tmp_path / "project", checkout):
        write(folder, {"src/same.py": "", "src/edited.py": ""})
    write(tmp_path / "project", {"src/edited.py": "new = 1"})
    environment = stage_environment(ROOT)
    environment["PYTHONPATH"] += f":{tmp_path / 'project' / 'src'}"
    code = "import json, same, edited; from pathlib import Path; from stowage.stages.inputs import imported_files; "
    said = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(sorted(imported_files(Path()))))"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(said.stdout) == [str(tmp_path / "project" / "src" / "edited.py"), "src/same.py"]


def test_a_link_in_the_standard_library_is_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's `sitecustomize.py` is one."""
    library = tmp_path / "lib" / "python"
    write(tmp_path, {"etc/sitecustomize.py": "", "mine.py": "", "lib/python/site-packages/__init__.py": ""})
    (library / "sitecustomize.py").symlink_to(tmp_path / "etc" / "sitecustomize.py")
    (library / "site-packages" / "linked.py").symlink_to(tmp_path / "mine.py")  # as some editable installs are
    monkeypatch.setattr(recorded, "_standard_library", lambda: (str(library),))
    files = [str(library / "sitecustomize.py"), str(library / "site-packages" / "linked.py")]
    found = imported_files(tmp_path / "project", files)
    assert str(tmp_path / "mine.py") in found
    assert str(tmp_path / "etc" / "sitecustomize.py") not in found


# --- the list, and dvc.yaml


@pytest.mark.parametrize("indent", ["      ", "    "])
def test_dvc_yaml_keeps_comments_and_what_people_wrote(tmp_path: Path, indent: str) -> None:
    text = (
        f"# Mine.\nstages:\n  trace:\n    cmd: python x.py   # runs\n    deps:\n{indent}- data  # a folder\n    outs:\n"
    )
    text += f'{indent}- "out"\n'
    (tmp_path / "dvc.yaml").write_text(text)
    unknown = write_inputs(tmp_path, NOTHING | {"trace": ["data/words.txt", "b.py", "a.py"]})
    assert unknown == {"trace": ["a.py", "b.py"]}
    new = f"{indent}- data  # a folder\n{indent}- a.py\n{indent}- b.py\n"
    assert (tmp_path / "dvc.yaml").read_text() == text.replace(f"{indent}- data  # a folder\n", new)
    assert listed_inputs(tmp_path) == {"trace": ["a.py", "b.py"], "train": []}
    assert write_inputs(tmp_path, NOTHING | {"trace": ["a.py", "b.py"]}) == {}
    assert write_inputs(tmp_path, NOTHING) == {}
    assert (tmp_path / "dvc.yaml").read_text() == text


def project_of(folder: Path) -> Path:
    """Two stages of a project, without anything to run."""
    stages = {name: {"cmd": f"run {name}", "deps": ["artifacts/device.json"]} for name in ("trace", "train")}
    write(folder, {"dvc.yaml": yaml.safe_dump({"stages": stages}, sort_keys=False)})
    return folder


def test_what_parameters_name_is_listed_before_anything_runs(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    write(project, {"src/mine/model.py": "", "losses.py": "", "corpus.txt": "", "tokens/tokenizer.json": ""})
    data = {"source": "corpus.txt", "tokenizer": str(project / "tokens")}
    settings = settings_of(data, model={"callable": "mine.model:build"}, loss="losses:loss")
    sentences = refresh(project, settings)
    assert "dvc.yaml now names losses.py, src/mine/model.py among the deps of trace." in sentences
    both = ["losses.py", "src/mine/model.py"]
    assert listed_inputs(project) == {"trace": both, "train": ["corpus.txt", *both, "tokens"]}
    assert refresh(project, settings) == []
    (project / "losses.py").unlink()
    assert refresh(project, settings) == [f"{LIST} and dvc.yaml no longer name losses.py, which is gone."]
    assert "losses.py" not in (project / "dvc.yaml").read_text()
    write(project, {"src/mine/rows.py": ""})
    refresh(project, settings_of({"callable": "mine.rows:batches"}, model={"callable": "mine.model:build"}))
    assert {"trace": ["src/mine/model.py"], "train": ["src/mine/model.py", "src/mine/rows.py"]}.items() <= {
        reader: [path for path in paths if path.startswith("src/")] for reader, paths in listed_inputs(project).items()
    }.items()
    installed = settings_of(model={"callable": "torch.nn:Linear"})
    assert refresh(project_of(tmp_path / "other"), installed) == []


def test_training_lists_what_tracing_does_and_more(tmp_path: Path) -> None:
    project, settings = project_of(tmp_path), settings_of()
    write(project, dict.fromkeys(("a.py", "b.py", "only_training.py"), ""))
    assert "trace also reads a.py, which dvc.yaml did not name" in (mend(project, settings, "trace", ["a.py"]) or "")
    sentence = mend(project, settings, "train", ["a.py", "only_training.py"])
    assert sentence is not None
    assert "train also reads only_training.py," in sentence
    assert mend(project, settings, "trace", ["b.py"]) is not None
    assert listed_inputs(project) == {"trace": ["b.py"], "train": ["b.py", "only_training.py"]}
    assert mend(project, settings, "trace", []) is None, "fewer files are no mistake"


# --- DVC


STAGE = """
import pathlib, sys
from stowage.stages.inputs import imported_files, require_listed
from stowage.stages.ir.command import run_stage
from stowage.stages.settings import load_settings
import my_model
def main():
    require_listed(pathlib.Path(), load_settings(), "trace", imported_files(pathlib.Path()))
    pathlib.Path("artifacts/trace").mkdir(parents=True)
    pathlib.Path("artifacts/trace/value.json").write_text(str(my_model.size()))
run_stage(main)
"""


@pytest.fixture
def own(toy: Path) -> Path:
    """The toy, whose `trace` builds a model of the user's."""
    pipeline = {
        "cmd": "python trace.py",
        "deps": ["trace.py"],
        "params": ["trace.seed", {str(LIST): ["trace"]}],
        "outs": ["artifacts/trace"],
    }
    write(
        toy,
        {
            "trace.py": STAGE,
            "my_model.py": "import layers\ndef size():\n    return layers.SIZE\n",
            "layers.py": "SIZE = 1\n",
            "dvc.yaml": yaml.safe_dump({"stages": {"trace": pipeline}}, sort_keys=False),
            "artifacts/inputs.yaml": yaml.safe_dump(NOTHING),
        },
    )
    set_parameters(toy, {"trace": {"model": {"architecture": None, "callable": "my_model:build"}}})
    commit(toy, "My model")
    return toy


def value(root: Path) -> str:
    return (root / "artifacts" / "trace" / "value.json").read_text()


def dvc(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = stage_environment(root) | {"PYTHONPATH": str(import_path(ROOT))}
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_dvc_sees_an_edit_of_an_imported_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dvc(own, "repro")
    assert first.returncode != 0
    assert (
        "error: trace also reads layers.py, my_model.py, which dvc.yaml did not name among its deps and now does: run "
        "the same command again." in first.stderr
    )
    assert dvc(own, "repro").returncode == 0
    assert changed_stages(own, ["trace"]) == {}
    write(own, {"layers.py": "SIZE = 2\n"})
    assert changed_stages(own, ["trace"]) == {"trace": [{"changed deps": {"layers.py": "modified"}}]}
    assert dvc(own, "repro").returncode == 0
    assert value(own) == "2"
    # Renamed: flows and `make run` drop what is gone, and run the stage again once it has found what is new.
    monkeypatch.setenv("PYTHONPATH", str(import_path(ROOT)))
    (own / "layers.py").rename(own / "blocks.py")
    write(own, {"my_model.py": "import blocks\ndef size():\n    return blocks.SIZE + 1\n"})
    assert refresh(own, load_settings(own / "params.yaml")) != []
    reproduce(own, "trace", print)
    assert value(own) == "3"
    assert changed_stages(own, ["trace"]) == {}
    # Gone, and nothing else changed: not clean either.
    write(own, {"my_model.py": "try:\n    import blocks as b\nexcept ImportError:\n    b = None\nsize = lambda: b"})
    reproduce(own, "trace", print)
    (own / "blocks.py").unlink()
    assert refresh(own, load_settings(own / "params.yaml")) != []
    reproduce(own, "trace", print)
    assert value(own) == "None"


def test_a_run_with_overrides_has_listed_files_that_git_ignores(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(import_path(ROOT)))
    write(own, {".gitignore": (own / ".gitignore").read_text() + "layers.py\n"})
    run(["git", "rm", "--cached", "--quiet", "layers.py"], own)
    commit(own, "Ignored")
    reproduce(own, "trace", print)
    before = [(own / name).read_bytes() for name in ("dvc.yaml", str(LIST), "dvc.lock")]
    write(own, {"layers.py": "SIZE = 5\n"})
    with open_workspace(own, {"trace.seed": 3}, print) as workspace:
        refresh(workspace.root, load_settings(workspace.root / "params.yaml"))
        reproduce(workspace.root, "trace", print)
        assert value(workspace.root) == "5"
    assert [(own / name).read_bytes() for name in ("dvc.yaml", str(LIST), "dvc.lock")] == before


MODEL = """
import torch
from torch import nn
from layers import Block

def build():
    return Block(), {"x": torch.ones(2, 4)}
"""
LAYERS = """
from torch import nn

class Block(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        from mine import late
        return late.squared(super().forward(x))
"""


def test_the_stage_lists_what_the_model_imports_even_while_it_runs(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "my_model.py": MODEL,
            "layers.py": LAYERS,
            "src/mine/__init__.py": "",
            "src/mine/late.py": "def squared(x):\n    return x * x\n",
            "src/mine/losses.py": "def loss(outputs, batch):\n    return outputs.sum()\n",
        },
    )
    for name in ("dvc.yaml", "params.yaml", "artifacts/device.json"):
        write(tmp_path, {name: ""})
        shutil.copyfile(ROOT / name, tmp_path / name)
    set_parameters(tmp_path, TINY)
    content = yaml.safe_load((tmp_path / "params.yaml").read_text())
    content["trace"] |= {"model": {"callable": "my_model:build"}, "loss": "mine.losses:loss"}
    write(tmp_path, {"params.yaml": yaml.safe_dump(content)})
    first = subprocess.run(
        [sys.executable, "-m", "stowage.stages.trace"],
        cwd=tmp_path,
        env=stage_environment(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    names = ["layers.py", "my_model.py", *(f"src/mine/{name}.py" for name in ("__init__", "late", "losses"))]
    assert first.returncode == 1
    assert first.stderr.strip().splitlines()[-1] == (
        f"error: trace also reads {', '.join(names)}, which dvc.yaml did not name among its deps and now does: run the "
        "same command again."
    )
    assert listed_inputs(tmp_path) == {"trace": names, "train": names}
    assert not (tmp_path / "artifacts" / "trace").exists()

"""`dvc.yaml` against the code: a dependency that it forgets would leave a stale result "up to date"."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from stowage.flows.pipeline.project import TRAIN_STAGES
from stowage.flows.starter.templates import template
from stowage.stages.inputs import LIST
from stowage.stages.inputs.named import READERS
from stowage.stages.inputs.origin import ORIGIN
from stowage.stages.ir.code_record import RECORD
from stowage.stages.ir.own_code import closure, file_of
from stowage.stages.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
NOBODYS = "stages/__init__.py"
"""Runs in every stage, holds no code, and is nobody's dependency."""
ALONE = ("trace", "solve.freeze")
"""The key of another's section by which a stage's result depends."""
NOT_PARAMETERS = {
    "profile.seconds_per_call",
    "profile.min_samples",
    "options.workers",
    "options.task_runner",
    "options.dask_scheduler",
}
"""Cannot change a result: timings are kept once measured, and schedules do not depend on who computes them."""


@cache
def pipeline() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    return content


def file_in_root(module: str) -> str:
    """The file of a module of ours, as `dvc.yaml` would name it."""
    path = file_of(module)
    assert path is not None
    return path.relative_to(ROOT).as_posix()


def packages(modules: set[str], listed: set[str]) -> set[str]:
    """For each module the longest listed folder or file that it is in; its own file if there is none."""
    found = set[str]()
    for file in {file_in_root(m) for m in modules} - {NOBODYS}:
        holding = [dep for dep in listed if file == dep or file.startswith(f"{dep}/")]
        found.add(max(holding, key=len, default=file))
    return found


def test_the_stages_are_the_chain_of_the_flows() -> None:
    assert tuple(pipeline()) == TRAIN_STAGES
    for name, stage in pipeline().items():
        assert stage["cmd"] == f"python -m stowage.stages.{name}"


@pytest.mark.parametrize("stage", TRAIN_STAGES)
def test_dependencies_are_the_packages_that_a_stage_imports(stage: str) -> None:
    main = f"stowage.stages.{stage}.__main__"
    assert file_of(main), f"stages/{stage}/__main__.py is missing"
    listed = {dep for dep in pipeline()[stage]["deps"] if dep.startswith(("stages/", "flows"))}
    assert listed == packages(closure(main), listed)


@pytest.mark.parametrize("stage", TRAIN_STAGES)
def test_formulations_are_listed_by_the_folders_that_a_stage_imports(stage: str) -> None:
    """An edit of O-ILP leaves the options of blocks as they are."""
    folder = "stages/formulations"
    listed = {dep for dep in pipeline()[stage]["deps"] if dep.startswith(folder)}
    parts = [file_in_root(m).split("/")[:3] for m in closure(f"stowage.stages.{stage}.__main__")]
    assert listed == {"/".join(part) for part in parts if "/".join(part[:2]) == folder}


def test_a_module_belongs_to_the_longest_listed_folder() -> None:
    modules = {"stowage.stages.formulations", "stowage.stages.formulations.offload.bounds", "stowage.stages.ir.plan"}
    listed = {"stages/formulations/__init__.py", "stages/formulations", "stages/formulations/offload", "stages"}
    assert packages(modules, listed) == {"stages/formulations/__init__.py", "stages/formulations/offload", "stages"}
    assert packages(modules, set()) == {file_in_root(m) for m in modules}


def test_what_no_stage_lists_holds_no_code() -> None:
    body = ast.parse((ROOT / NOBODYS).read_text()).body
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def parameters(stage: dict[str, Any]) -> list[str]:
    """Keys of `params.yaml` that a stage tracks."""
    return [key for key in stage.get("params", []) if isinstance(key, str)]


def keys(section: type[BaseModel], prefix: str) -> set[str]:
    return {f"{prefix}.{name}" for name in section.model_fields}


def test_every_parameter_is_tracked_by_its_stage() -> None:
    tracked = {key for stage in pipeline().values() for key in parameters(stage)}
    known = set[str]()
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        known |= keys(field.annotation, name)
    assert tracked == known - NOT_PARAMETERS


def test_a_stage_tracks_its_own_section() -> None:
    """And of others what it reads: the trace of a step that freezes has operators of its own."""
    others = {"trace": {"solve"}, "partition": {"options"}, "solve": {"options"}, "train": {"trace"}}
    asks = {"trace", "profile", "partition", "solve", "train"}
    for name, stage in pipeline().items():
        sections = {key.partition(".")[0] for key in parameters(stage)}
        assert sections - ({"lossy"} if name in asks else set()) <= {name} | others.get(name, set())


def test_every_tracked_parameter_is_in_params_yaml() -> None:
    load_settings(ROOT / "params.yaml")
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    for stage in pipeline().values():
        for key in parameters(stage):
            section, _, name = key.partition(".")
            assert name in content[section], key


def test_stages_that_read_what_is_the_users_track_the_list_of_it() -> None:
    """A file that is gone is in no deps any more: the changed list makes its stage stale."""
    listed = yaml.safe_load((ROOT / LIST).read_text())
    assert listed.keys() == set(READERS)
    for name, stage in pipeline().items():
        lists = [entry for entry in stage.get("params", []) if isinstance(entry, dict)]
        assert lists == ([{str(LIST): [name]}] if name in READERS else [])
    for reader, paths in listed.items():
        assert set(paths) <= set(pipeline()[reader]["deps"])


def test_stages_write_only_their_own_folder() -> None:
    for name, stage in pipeline().items():
        outs = [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]
        paths = [next(iter(out)) if isinstance(out, dict) else out for out in outs]
        assert paths
        own = f"artifacts/{name}"
        others = [path for path in paths if not (path == own or path.startswith(f"{own}/"))]
        assert others == ([str(ORIGIN)] if name == "trace" else [])


def test_the_wheel_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(["stowage", *path.parent.relative_to(ROOT).parts])
        for folder in ("flows", "stages")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed) == found | {"stowage"}


def test_this_is_the_only_pipeline_that_dvc_finds_here() -> None:
    """DVC takes every `dvc.yaml` of a repository for a pipeline, and reads it with every command."""
    found = [path for folder in ("flows", "stages", "package", "docs") for path in (ROOT / folder).rglob("dvc.yaml")]
    assert found == []


def test_projects_elsewhere_have_the_same_stages() -> None:
    """Sections are tracked as wholes there, so that params.yaml may be short; code by the hashes of the record.

    But for the one key of another's section by which a stage's result depends: another budget does not trace again.
    """
    elsewhere = yaml.safe_load(template("dvc.yaml"))["stages"]
    assert list(elsewhere) == list(pipeline())
    for name, stage in pipeline().items():
        there = elsewhere[name]
        for key in ("desc", "cmd", "outs", "metrics", "plots"):
            assert there.get(key) == stage.get(key), f"{name}.{key}"
        assert there.get("deps", []) == [dep for dep in stage["deps"] if dep.startswith("artifacts/")]
        sections = list(
            dict.fromkeys(key if (name, key) == ALONE else key.partition(".")[0] for key in parameters(stage))
        )
        files = [entry for entry in stage.get("params", []) if isinstance(entry, dict)]
        assert sorted(map(str, there["params"])) == sorted(
            map(str, [*sections, *files, {str(RECORD): [f"stages.{name}"]}])
        )

"""`dvc.yaml` against the code: a dependency that it forgets would leave a stale result "up to date"."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from stowage.flows.pipeline.project import TRAIN_STAGES
from stowage.stages.inputs import LIST
from stowage.stages.inputs.named import READERS
from stowage.stages.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
MODULE = re.compile(r"stowage(\.\w+)+")
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


def file_of(module: str) -> Path | None:
    """The file of `stowage.a.b`, None when there is no such module."""
    path = ROOT.joinpath(*module.split(".")[1:])
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def imports(path: Path, module: str) -> set[str]:
    """Modules of ours that a file imports, anywhere in it, or names in a string (to run as a process),
    with the packages that they are in."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            found.add(node.value)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    ours = {name for name in found if name.startswith("stowage.") and file_of(name)}
    return ours | {name.rsplit(".", cut)[0] for name in ours for cut in range(1, name.count("."))}


def closure(start: str) -> set[str]:
    """Every module of ours that running `start` may import."""
    todo, seen = [start, start.rpartition(".")[0]], set[str]()
    while todo:
        module = todo.pop()
        path = file_of(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        todo.extend(imports(path, module) - seen)
    return seen


def packages(modules: set[str]) -> set[str]:
    """Folders directly below `stages` (and `flows`) that these modules are in."""
    parts = [module.split(".")[1:] for module in modules]
    return {"/".join(part[:2]) for part in parts if part[0] == "stages" and len(part) > 1} | {
        "flows" for part in parts if part[0] == "flows"
    }


def test_the_stages_are_the_chain_of_the_flows() -> None:
    assert tuple(pipeline()) == TRAIN_STAGES
    for name, stage in pipeline().items():
        assert stage["cmd"] == f"python -m stowage.stages.{name}"


@pytest.mark.parametrize("stage", TRAIN_STAGES)
def test_dependencies_are_the_packages_that_a_stage_imports(stage: str) -> None:
    main = f"stowage.stages.{stage}.__main__"
    assert file_of(main), f"stages/{stage}/__main__.py is missing"
    listed = {dep for dep in pipeline()[stage]["deps"] if dep.startswith(("stages/", "flows"))}
    assert listed == packages(closure(main))


def test_what_no_stage_lists_holds_no_code() -> None:
    """`stages/__init__.py` runs in every stage and is nobody's dependency."""
    body = ast.parse((ROOT / "stages" / "__init__.py").read_text()).body
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
    others = {"partition": {"options"}, "solve": {"options"}, "train": {"trace"}}
    for name, stage in pipeline().items():
        sections = {key.partition(".")[0] for key in parameters(stage)}
        assert sections <= {name} | others.get(name, set())


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
        assert all(path == f"artifacts/{name}" or path.startswith(f"artifacts/{name}/") for path in paths)


def test_the_wheel_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(["stowage", *path.parent.relative_to(ROOT).parts])
        for folder in ("flows", "stages")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed) == found

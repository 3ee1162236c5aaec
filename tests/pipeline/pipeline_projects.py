"""What tests of the pipeline share: commands, and the parameters of small projects."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stowage.flows.pipeline.project import import_path, stage_environment

ROOT = Path(__file__).parents[2]
IDENTITY = {f"GIT_{who}_{what}": "tests@stowage" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

TOY_STAGES: dict[str, tuple[str, list[str], str]] = {
    "trace": ("trace.seed", [], "artifacts/trace"),
    "solve": ("solve.device_budget", ["artifacts/trace"], "artifacts/solve"),
}
"""Stage -> parameter, dependencies, output."""
TOY_STAGE = """
import json, pathlib, sys, yaml
name = sys.argv[1]
params = yaml.safe_load(pathlib.Path("params.yaml").read_text())
if params["trace"].get("seed") == 13:
    sys.exit("error: Thirteen is not a seed: choose another.")
folder = pathlib.Path("artifacts") / name
folder.mkdir(parents=True, exist_ok=True)
(folder / "value.json").write_text(json.dumps(params.get(name)))
with open(pathlib.Path(".stowage") / "costs" / "runs.txt", "a") as file:
    file.write(name + "\\n")
"""


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command that must succeed; its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**stage_environment(folder), **IDENTITY, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commit(folder: Path, message: str) -> None:
    """Commit everything that is not ignored."""
    run(["git", "add", "--all"], folder)
    run(["git", "commit", "--quiet", "--message", message], folder)


def copied_project(folder: Path) -> Path:
    """Copy this repository, edits included and tests left out, into a new Git repository, without a `dvc.lock`."""
    run(["git", "init", "--quiet", "--initial-branch", "main", str(folder)], ROOT)
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file() and name != "dvc.lock" and not name.startswith("tests/"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    import_path(folder)
    return folder


def merge(content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set nested keys of `content`."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(content.get(key), dict):
            merge(content[key], value)
        else:
            content[key] = value


def set_parameters(folder: Path, changes: Mapping[str, Any]) -> None:
    """Edit `params.yaml` as a person would."""
    path = folder / "params.yaml"
    content = yaml.safe_load(path.read_text())
    merge(content, changes)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


TINY = {
    "trace": {
        "model": {"overrides": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}},
        "batch_size": 2,
        "sequence_length": 32,
    },
    "profile": {"seconds_per_call": 0.001, "min_samples": 1},
    "options": {"peak_budgets": 2, "save_budgets": 2, "time_limit_s": 0.1, "workers": 1},
    "solve": {"device_budget": "80%", "memory_slots": 100},
    "train": {"steps": 3, "checkpoint_every": 2, "measure_every": 1},
}

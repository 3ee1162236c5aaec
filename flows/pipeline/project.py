"""Finds the project, and makes the environment of its stages."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.own_code import STAGES

TRAIN_STAGES = STAGES
PLAN_STAGES = STAGES[:-1]


def find_root(start: Path | None = None) -> Path:
    """Return the nearest folder at or above `start` (the current folder) that has both `dvc.yaml` and `params.yaml`.

    Raises:
        StowageError: there is none, or its `dvc.yaml` was copied out of Stowage's own repository.
    """
    first = (start or Path.cwd()).resolve()
    for folder in (first, *first.parents):
        if (folder / "dvc.yaml").is_file() and (folder / "params.yaml").is_file():
            if is_misplaced(folder):
                raise StowageError(
                    f"{folder / 'dvc.yaml'} belongs to a checkout of Stowage itself, whose folder `stages` is not "
                    "here: delete it and run `stowage init`, which writes one for this repository."
                )
            return folder
    raise StowageError(
        f"{first} is not inside a Stowage project: run `stowage init` here to make it one, or go to a folder that has "
        "dvc.yaml and params.yaml."
    )


def is_checkout(root: Path) -> bool:
    """Return whether `root` is a checkout of Stowage itself, whose stages run the code that is there."""
    return all((root / folder / "__init__.py").is_file() for folder in ("flows/pipeline", "stages/ir"))


def is_misplaced(root: Path) -> bool:
    """Return whether `dvc.yaml` names the folders of a checkout of Stowage, and `root` is none."""
    if is_checkout(root):
        return False
    try:
        lines = (root / "dvc.yaml").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return {"- stages/ir", "- stages/trace"} <= {line.strip() for line in lines}


def import_path(root: Path) -> Path:
    """Make a folder from which Python imports `stowage` out of the checkout `root`, even if another one is installed.

    What DVC hashes is `root/flows` and `root/stages`, so that is what stages must run.
    """
    tree = root / "build" / "typing"
    package = tree / "stowage"
    package.mkdir(parents=True, exist_ok=True)
    files = sorted(f"package/{path.name}" for path in (root / "package").glob("*.py*") if path.is_file())
    for name in ("flows", "stages", *files):
        with contextlib.suppress(FileExistsError):
            (package / Path(name).name).symlink_to(Path("..") / ".." / ".." / name)
    return tree


def stage_environment(root: Path) -> dict[str, str]:
    """Return the environment of a stage's process: this interpreter's `python` and `dvc`, and the project's code."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    if is_checkout(root):
        others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([str(import_path(root)), *others])
    return environment

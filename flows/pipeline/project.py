"""Where the project is, and the environment that its stages run in."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from stowage.stages.ir.errors import StowageError

PLAN_STAGES = ("trace", "profile", "partition", "options", "solve", "codegen")
TRAIN_STAGES = (*PLAN_STAGES, "train")


def find_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` (the current folder) that has both `dvc.yaml` and `params.yaml`.

    Raises:
        StowageError: there is none.
    """
    first = (start or Path.cwd()).resolve()
    for folder in (first, *first.parents):
        if (folder / "dvc.yaml").is_file() and (folder / "params.yaml").is_file():
            return folder
    raise StowageError(f"{first} is not inside a Stowage project: run in a folder that has dvc.yaml and params.yaml.")


def import_path(root: Path) -> Path:
    """A folder from which Python imports `stowage` out of `root`, wherever the installed package is.

    What DVC hashes is `root/flows` and `root/stages`, so that is what stages must run.
    """
    tree = root / "build" / "typing"
    (tree / "stowage").mkdir(parents=True, exist_ok=True)
    for name in ("flows", "stages"):
        with contextlib.suppress(FileExistsError):
            (tree / "stowage" / name).symlink_to(Path("..") / ".." / ".." / name)
    return tree


def stage_environment(root: Path) -> dict[str, str]:
    """Environment of a stage's process: this interpreter's `python` and `dvc` first, and the project's own code."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    if (root / "stages").is_dir():
        others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([str(import_path(root)), *others])
    return environment

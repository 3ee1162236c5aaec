"""Prepares Git and DVC of the repository that a project is made in."""

from __future__ import annotations

from pathlib import Path

from stowage.flows.pipeline.dvc import dvc_output
from stowage.flows.pipeline.git import git
from stowage.stages.ir.errors import StowageError


def folder_in_repository(root: Path) -> str:
    """Return the path of `root` in its Git repository, `.` for the top.

    Raises:
        StowageError: it is in none.
    """
    try:
        top = Path(git(root, "rev-parse", "--show-toplevel")).resolve()
    except (StowageError, OSError):
        raise StowageError(f"{root} is in no Git repository: run `git init` there first.") from None
    return root.resolve().relative_to(top).as_posix()


def start_dvc(root: Path, folder: str) -> str | None:
    """Initialise DVC unless it is; return a sentence if that was done.

    Raises:
        StowageError: DVC refuses.
    """
    if dvc_root(root) is not None:
        return None
    dvc_output(root, "init", "--quiet", *(() if folder == "." else ("--subdir",)))
    return f"initialised DVC in {root}"


def dvc_root(root: Path) -> Path | None:
    """Return the nearest folder at or above `root` that DVC was initialised in."""
    return next((folder for folder in (root, *root.parents) if (folder / ".dvc" / "config").is_file()), None)


def ignored_by_git(root: Path, paths: list[str]) -> list[str]:
    """Return those of `paths` that Git ignores, which must be committed."""
    found = []
    for path in paths:
        try:
            git(root, "check-ignore", "--quiet", path)
        except StowageError:
            continue
        found.append(path)
    return found

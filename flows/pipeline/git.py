"""Makes checkouts of the working tree as it is, beside the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stowage.stages.ir.errors import StowageError

OWN_FILES = (
    "params.yaml",
    "dvc.yaml",
    "dvc.lock",
    ".dvc/config",
    ".dvcignore",
    "artifacts/device.json",
    "artifacts/inputs.yaml",
)
"""Files of a project that a run needs, whether Git has them or not."""


@dataclass(frozen=True)
class TreeSnapshot:
    """A commit of tracked files as they are now, of new Python files and of the project's own; on no branch.

    Attributes:
        commit: its hash.
        tree: hash of its content; equal for equal content.
    """

    commit: str
    tree: str


def git(root: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Return what a Git command prints, stripped.

    Raises:
        StowageError: it failed.
    """
    done = subprocess.run(
        ["git", *arguments],
        cwd=root,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr.strip() or "no message").splitlines()[-1].removeprefix("fatal: ")
        raise StowageError(f"`git {' '.join(arguments)}` failed in {root}: {words}")
    return done.stdout.strip()


def snapshot(root: Path) -> TreeSnapshot:
    """Commit the working tree as it is without touching it, its index or its branch, which may have no commit yet."""
    head = _head(root)
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        if head:
            git(root, "read-tree", "HEAD", environment=index)
            git(root, "add", "--update", ":/", environment=index)
        if git(root, "ls-files", "--others", "--exclude-standard", "--", ":/*.py"):
            git(root, "add", "--", ":/*.py", environment=index)
        if own := [name for name in OWN_FILES if (root / name).is_file()]:
            git(root, "add", "--force", "--", *own, environment=index)
        tree = git(root, "write-tree", environment=index)
    if head and tree == git(root, "rev-parse", "HEAD^{tree}"):
        return TreeSnapshot(head, tree)
    nobody = {f"GIT_{who}_{what}": "stowage" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    parents = ["-p", "HEAD"] if head else []
    commit = git(root, "commit-tree", tree, *parents, "-m", "A run's snapshot", environment=nobody)
    return TreeSnapshot(commit, tree)


def _head(root: Path) -> str | None:
    """Return the hash of the branch's commit; None where there is none yet."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except StowageError:
        if not git(root, "rev-parse", "--is-inside-work-tree"):
            raise
        return None


def add_worktree(root: Path, folder: Path, commit: str) -> None:
    """Check `commit` out in `folder`; a checkout that a killed run left is taken over, ignored files and all."""
    if (folder / ".git").exists():
        git(folder, "reset", "--hard", commit)
        return
    shutil.rmtree(folder, ignore_errors=True)
    git(root, "worktree", "prune")
    git(root, "worktree", "add", "--detach", str(folder), commit)


def remove_worktree(root: Path, folder: Path) -> None:
    """Remove a checkout that `add_worktree` made."""
    shutil.rmtree(folder, ignore_errors=True)
    git(root, "worktree", "prune")

"""Opens the checkout that a flow run works in: the project under a lock, or, with overrides, a worktree of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from stowage.flows.pipeline.dvc import dvc_output
from stowage.flows.pipeline.git import add_worktree, git, remove_worktree, snapshot
from stowage.flows.pipeline.inputs import input_paths
from stowage.flows.pipeline.overrides import Overrides, check, rewrite
from stowage.stages.ir.files import locked, make_folder
from stowage.stages.settings import load_settings

SHARED_STORES = ("costs", "options")
"""Folders of `.stowage` that runs may share: they are content-addressed and written atomically."""


@dataclass(frozen=True)
class Workspace:
    """A checkout in which stages run.

    Attributes:
        root: project root of the checkout.
        results: folder of the run's artifacts once it has ended.
        temporary: `root` is removed at the end, so artifacts must be copied to `results`.
    """

    root: Path
    results: Path
    temporary: bool


@contextlib.contextmanager
def open_workspace(root: Path, overrides: Overrides, log: Callable[[str], None]) -> Iterator[Workspace]:
    """Keep a workspace that no other flow run uses.

    Without overrides it is `root`. With overrides it is a Git worktree of the project as it is now (edited tracked
    files and new Python files included), named by content and overrides, which shares DVC's cache and the stores. It
    is removed at the end; a run that was interrupted leaves it, and the same run, started again, continues in it.

    Raises:
        ParameterError: an override is wrong.
        StowageError: Git or DVC refuse.
    """
    check(root, overrides)
    if not overrides:
        with _locked(root / ".stowage" / "flow.lock", log):
            yield Workspace(root, root / "artifacts", temporary=False)
        return
    content = snapshot(root)
    key = hashlib.sha256(json.dumps([content.tree, dict(overrides)], sort_keys=True).encode()).hexdigest()[:12]
    checkout = root / ".worktrees" / key
    with _locked(root / ".worktrees" / f"{key}.lock", log):
        add_worktree(root, checkout, content.commit)
        try:
            inside = checkout / git(root, "rev-parse", "--show-prefix")
            rewrite(inside, overrides)
            _connect(root, inside)
            yield Workspace(inside, root / ".stowage" / "runs" / key, temporary=True)
        except Exception:
            remove_worktree(root, checkout)
            raise
        remove_worktree(root, checkout)


@contextlib.contextmanager
def _locked(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, timeout_s=0))
        except Timeout:
            log(f"another flow run holds {path}; waiting for it")
            held.enter_context(locked(path))
        yield


def _connect(root: Path, inside: Path) -> None:
    """Share DVC's cache, the stores and ignored inputs of `root` with the checkout `inside`."""
    local = _dvc_folder(root) / "config.local"
    if local.is_file():
        shutil.copyfile(local, _dvc_folder(inside) / "config.local")
    cache = (root / dvc_output(root, "cache", "dir").strip()).resolve()
    dvc_output(inside, "cache", "dir", "--local", str(cache))
    for name in SHARED_STORES:
        store = root / ".stowage" / name
        make_folder(store)
        _link(inside / ".stowage" / name, store)
    for path in input_paths(root, load_settings(inside / "params.yaml")):
        _link(inside / path, root / path)


def _dvc_folder(root: Path) -> Path:
    """Return DVC's folder of a project, which may be that of a repository around it."""
    return next((f / ".dvc" for f in (root, *root.parents) if (f / ".dvc").is_dir()), root / ".dvc")


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not (place.exists() or place.is_symlink()):
        place.symlink_to(target)

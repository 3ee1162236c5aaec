"""Finds the user's files that this process has imported or executed."""

from __future__ import annotations

import filecmp
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from stowage.stages.inputs.named import SOURCE_FOLDERS

WORKTREES = ".worktrees"
"""Folder of a project in which runs with overrides have their checkouts."""
_INSTALLED = {"site-packages", "dist-packages"}


class ExecutedFiles:
    """Records files whose code is executed from now on, including those that are run by path and never imported.

    Python cannot remove an audit hook, so use it only in the process of a stage.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and isinstance(code := arguments[0], CodeType):
            self.paths.add(code.co_filename)


def look_in_src(root: Path) -> None:
    """Import modules from the project's `src` too, with the lowest priority."""
    for name in filter(None, SOURCE_FOLDERS):
        folder = str(root.resolve() / name)
        if os.path.isdir(folder) and folder not in sys.path:
            sys.path.append(folder)


def imported_files(root: Path, executed: Iterable[str] = ()) -> set[str]:
    """Return files of the user's that this process has imported, and those of `executed` that are the user's.

    The user's files are those that neither Python nor a package installer put there: files inside the project's
    root, of editable installs and of folders on the path. Those inside the root are given relative to it, others
    absolutely.
    """
    root = root.resolve()
    project = _project_of(root)
    libraries = list(_libraries(root))
    found = set[str]()
    for file in {*_files_of_modules(), *executed}:
        path = Path(file)
        if not path.is_absolute() or not path.is_file() or _is_pythons(path):
            continue
        if not _is_installed(path.resolve(), root, libraries):
            found.add(_as_listed(path.resolve(), root, project))
    return found


def _files_of_modules() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield file


def _libraries(root: Path) -> Iterator[Path]:
    """Yield folders that Python, package installers and caches fill, and those of our own code."""
    paths = sysconfig.get_paths()
    yield from (Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    yield from (Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages()))
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
    yield from (folder for folder in _own_folders() if not folder.is_relative_to(root))


def _is_pythons(path: Path) -> bool:
    """Return whether a file is in the standard library's folder, wherever a link leads from there.

    Distributions keep a `sitecustomize.py` among their settings.
    """
    return _INSTALLED.isdisjoint(path.parts) and any(map(path.is_relative_to, _standard_library()))


@cache
def _standard_library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["stdlib"], paths["platstdlib"]})


def _own_folders() -> tuple[Path, ...]:
    """Return folders of our own code, which is among a stage's deps already, as folders or by its hash."""
    stages = Path(__file__).resolve().parents[1]
    return (stages, stages.parent / "flows", stages.parent / "package")


def _is_installed(path: Path, root: Path, libraries: list[Path]) -> bool:
    if path.is_relative_to(root):
        return any(map(path.is_relative_to, _own_folders())) or not _INSTALLED.isdisjoint(path.relative_to(root).parts)
    return not _INSTALLED.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in libraries)


def _project_of(root: Path) -> Path:
    """Return the project that `root` is a run's checkout of; `root` itself otherwise."""
    return next((folder.parent for folder in root.parents if folder.name == WORKTREES), root)


def _as_listed(path: Path, root: Path, project: Path) -> str:
    """Return a path as the list names it.

    An editable install of the project itself leads out of a run's checkout, to files that the checkout has too.
    """
    for base in (root, project):
        if path.is_relative_to(base):
            inside = root / path.relative_to(base)
            if inside == path or (inside.is_file() and filecmp.cmp(inside, path, shallow=False)):
                return path.relative_to(base).as_posix()
    return path.as_posix()

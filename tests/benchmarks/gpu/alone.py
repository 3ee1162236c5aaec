"""`python alone.py MODULE ARGUMENT …` runs a module where only what a machine that trains needs is installed.

Everything else is hidden: it cannot be imported, and nobody is told that it is there.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NEEDED = ("torch", "transformers", "pyarrow", "safetensors")
COMMAND_LINES = {"typer", "rich", "click"}
"""Libraries of command lines, which transformers requires for its own: not ours to lean on."""


def present() -> set[str]:
    """The distributions that there are: those needed, and what they require."""
    todo, found = list(NEEDED), set[str]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found or name in COMMAND_LINES:
            continue
        found.add(name)
        try:
            listed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        todo += [r.name for r in listed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


class Only(PathFinder):
    """The usual finder, blind to modules of other distributions."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for what is hidden."""
        return None if fullname.partition(".")[0] in cls.hidden else super().find_spec(fullname, path, target)


def hide() -> frozenset[str]:
    """Hide everything else, in this process; the names that are hidden."""
    here = present()
    owners = packages_distributions()
    Only.hidden = frozenset(
        module
        for module, distributions in owners.items()
        if module != "stowage" and not here.intersection(map(canonicalize_name, distributions))
    )
    sys.meta_path[:] = [Only if finder is PathFinder else finder for finder in sys.meta_path]
    for module in [m for m in sys.modules if m.partition(".")[0] in Only.hidden]:
        del sys.modules[module]
    return Only.hidden


def alone_everywhere(root: Path) -> dict[str, str]:
    """An environment in which every process, and all that it starts, has only that; the code is that of `root`."""
    paths = [str(Path(__file__).parent / "everywhere"), str(root / "build" / "typing")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    print("hidden:", ",".join(sorted(hide())))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""Finds Stowage's own files that a stage runs, by reading their imports, and makes one hash of them.

A checkout of Stowage names folders of code among the deps of a stage. A project in another repository has these hashes
instead: they change when the installed package does, and only for stages whose code changed.
"""

from __future__ import annotations

import ast
import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains `stages` and `flows`, in a checkout or in the installed package."""
STAGES = ("trace", "profile", "partition", "options", "solve", "codegen", "train")
_MODULE = re.compile(r"stowage(\.\w+)+")
_OURS = ("stowage.stages.", "stowage.flows.")


def file_of(module: str) -> Path | None:
    """Return the file of `stowage.stages.a.b`; None when there is no such module."""
    if not f"{module}.".startswith(_OURS):
        return None
    path = ROOT.joinpath(*module.split(".")[1:])
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


@cache
def imports(path: Path, module: str) -> frozenset[str]:
    """Return Stowage's modules that a file imports, or names in a string to run them, and their packages."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
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
    ours = {name for name in found if file_of(name)}
    return frozenset(ours | {name.rsplit(".", cut)[0] for name in ours for cut in range(1, name.count("."))})


def closure(start: str) -> set[str]:
    """Return every module of Stowage that running `start` may import, itself included."""
    todo, seen = [start, start.rpartition(".")[0]], set[str]()
    while todo:
        module = todo.pop()
        path = file_of(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        todo.extend(imports(path, module) - seen)
    return seen


def stage_hash(stage: str) -> str:
    """Hash every file of Stowage that `python -m stowage.stages.STAGE` may run."""
    digest = hashlib.sha256()
    for module in sorted(closure(f"stowage.stages.{stage}.__main__")):
        path = file_of(module)
        assert path is not None
        digest.update(f"{module}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def package_hash() -> str:
    """Hash the files of all stages: while it is the same, so are the hashes of the stages."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "stages").rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]

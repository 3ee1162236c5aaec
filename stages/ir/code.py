"""Hashes of source code: stored results are named by the code that made them, not by versions raised by hand."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


@cache
def code_hash(*names: str, words: bool = True) -> str:
    """Hash the source of modules, and of everything inside packages; computed once per process.

    Args:
        names: modules and packages, as they are imported.
        words: hash every byte. If false, docstrings, comments and layout are ignored: that takes thirty times as long,
            and is for few files whose results are expensive to make again.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        for label, path in _files(name):
            content = path.read_bytes() if words else _meaning(path.read_bytes())
            digest.update(f"{label} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def versions_of(*libraries: str) -> tuple[str, ...]:
    """Return the versions of other people's packages, `name version` each, without those that are not installed."""
    found: list[str] = []
    for name in libraries:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return tuple(found)


def _files(name: str) -> list[tuple[str, Path]]:
    """Return the files of a module or package, each with a label that does not depend on where it is installed."""
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {name}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if folders:
        inside = [(folder, path) for folder in folders for path in folder.rglob("*.py")]
        return sorted((f"{name}/{path.relative_to(folder).as_posix()}", path) for folder, path in inside)
    return [(name, Path(spec.origin or ""))]


def _meaning(source: bytes) -> bytes:
    """Return the dump of a module's syntax tree without docstrings and other bare strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            inside = getattr(node, field, None)
            if isinstance(inside, list):
                setattr(node, field, [line for line in inside if not _says_only(line)])
    return ast.dump(tree).encode()


def _says_only(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)

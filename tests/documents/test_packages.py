"""The docstring of each package names all that is inside, and nothing that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for top in ("stages", "flows") for path in (ROOT / top).rglob("__init__.py"))


def inside(package: Path) -> set[str]:
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    return modules | {path.parent.name for path in package.glob("*/__init__.py")}


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_package_says_what_is_inside(package: Path) -> None:
    text = docstring(package)
    assert not [name for name in sorted(inside(package)) if not re.search(rf"\b{name}\b", text)]
    # `a.py`, `b/`: does this
    listed = re.findall(r"^- ((?:`[\w./]+`(?:, )?)+):", text, re.MULTILINE)
    named = [name.rstrip("/").removesuffix(".py") for names in listed for name in re.findall(r"`([\w./]+)`", names)]
    there = inside(package) | {"__main__"} | {path.name for path in package.iterdir()}
    assert not [name for name in named if name not in there]

"""The command that tries other versions: which interpreter it takes, and its table."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parent / "run"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    """The command as a module."""
    loader = SourceFileLoader("versions_run", str(RUN))
    spec = importlib.util.spec_from_loader("versions_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_path_comes_first(run: ModuleType) -> None:
    assert run.python_of("3.12", lambda name: f"/somewhere/{name}") == "/somewhere/python3.12"


def test_the_newest_of_pyenv(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.12.1", "3.12.4"):
        binary = tmp_path / "versions" / version / "bin" / "python"
        binary.parent.mkdir(parents=True)
        binary.touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert run.python_of("3.12", lambda name: None) == str(tmp_path / "versions" / "3.12.4" / "bin" / "python")
    assert run.python_of("3.13", lambda name: None) is None


def test_the_table_has_every_pair(run: ModuleType) -> None:
    text = run.table([("3.11", "2.13.0", "passed (9 passed)"), ("3.13", "2.14.1", "not at hand: no such Python")])
    assert text.splitlines() == [
        "Python  torch   exactness",
        "3.11    2.13.0  passed (9 passed)",
        "3.13    2.14.1  not at hand: no such Python",
    ]

"""The command that tries other versions: which interpreters it finds, and which pins it keeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parent / "run.py"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command as a module, on a machine without Pythons, and with another project."""
    spec = importlib.util.spec_from_file_location("versions_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "versions_run", module)
    spec.loader.exec_module(module)
    for name, place in (("PYENV_ROOT", tmp_path / "pyenv"), ("PATH", tmp_path / "bin")):
        monkeypatch.setenv(name, str(place))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "environments")
    return module


def python(path: Path, answer: str) -> Path:
    """A program that says that it is a version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {answer}\n")
    path.chmod(0o755)
    return path


def test_the_path_comes_first(run: ModuleType, tmp_path: Path) -> None:
    of_pyenv = python(tmp_path / "pyenv/versions/3.12.4/bin/python", "3.12")
    assert list(run.interpreters("3.12")) == [of_pyenv]
    first = python(tmp_path / "bin/python3.12", "3.12")
    assert list(run.interpreters("3.12")) == [first, of_pyenv]
    assert not list(run.interpreters("3.13"))


def test_what_answers_for_another_version_is_passed_over(run: ModuleType, tmp_path: Path) -> None:
    python(tmp_path / "bin/python3.12", "")
    assert not list(run.interpreters("3.12"))


def test_pins_that_hang_on_torch_are_left_out(run: ModuleType, tmp_path: Path) -> None:
    pins = ["numpy==2.4.6", "nvidia-cublas==13.1", "torch==2.13.0", "torchvision==0.28.0", "torchmetrics==1.9"]
    (tmp_path / "constraints.txt").write_text("\n".join(pins))
    assert run.constraints().read_text().split() == ["numpy==2.4.6", "torchmetrics==1.9"]


def test_a_python_that_is_not_here_is_a_line(run: ModuleType) -> None:
    result = run.run("3.12", "2.13.0")
    assert (result.said, result.ran, result.failed) == ("no python3.12 here", False, False)

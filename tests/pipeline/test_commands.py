"""Every module that can be run says what it is for, and runs nothing when it is asked for what it does not have."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_projects import ROOT

from stowage.flows.pipeline.project import stage_environment


def commands() -> list[str]:
    """Modules that do something as `python -m MODULE`."""
    paths = [path for folder in ("flows", "stages") for path in sorted((ROOT / folder).rglob("*.py"))]
    runnable = [path for path in paths if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8")]
    return [
        ".".join(["stowage", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__main__")
        for path in runnable
    ]


def started(module: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of `python -m module`, run in this process, where everything is imported already."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return ended.value.code if isinstance(ended.value.code, int) else int(ended.value.code is not None)


def test_what_people_run_is_among_the_commands() -> None:
    found = commands()
    stages = ("trace", "profile", "partition", "options", "solve", "codegen", "train", "device", "inputs")
    flows = ("plan", "train", "show", "compare", "benchmark", "batch_size", "gpu")
    assert {*(f"stowage.stages.{name}" for name in stages), *(f"stowage.flows.{name}" for name in flows)} <= set(found)
    public = {f"stowage.flows.{path.stem}" for path in (ROOT / "flows").glob("[!_]*.py")}
    assert public <= set(found)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", commands())
def test_help_and_unknown_options_run_nothing(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where nothing could run
    assert started(module, "--help", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr()
    assert "usage: " in said.out.lower()
    assert len(said.out.split()) > 10
    assert said.err == ""
    assert started(module, "--no-such-option", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    assert line.startswith("error: ")
    assert os.listdir(tmp_path) == []


def test_a_process_says_the_same(tmp_path: Path) -> None:
    for arguments, status in ((["--help"], 0), (["--no-such-option"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "stowage.stages.codegen", *arguments],
            cwd=tmp_path,
            env=stage_environment(ROOT),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert "python -m stowage.stages.codegen" in done.stdout + done.stderr

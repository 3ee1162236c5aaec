"""The console command: a list of commands that takes no torch, and each command's own options and mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_projects import ROOT

import stowage
from stowage.flows.cli.commands import COMMANDS
from stowage.flows.cli.main import loaded
from stowage.flows.pipeline.extras import MissingExtraError, require_extra
from stowage.flows.pipeline.project import stage_environment


def stowage_command(
    *words: str, folder: Path, python: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "stowage", *words],
        cwd=folder,
        env={**stage_environment(ROOT), "COLUMNS": "100", **more},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_every_command_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done = stowage_command("--help", folder=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line[2:3].strip()]
    assert listed == list(COMMANDS)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not {"torch", "transformers", "prefect", "dvc", "numpy", "pyarrow"} & imported


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_that_runs(name: str) -> None:
    path = ROOT.joinpath(*COMMANDS[name].module.split(".")[1:]).with_suffix(".py")
    assert '\nif __name__ == "__main__":\n' in path.read_text()
    assert loaded(name).name == name
    if not COMMANDS[name].words:
        assert loaded(name).help


def test_every_public_flow_is_a_command() -> None:
    files = {path.stem for path in (ROOT / "flows").glob("[!_]*.py")}
    assert files == {command.module.rpartition(".")[2] for command in COMMANDS.values()}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--version"], 0, f"stowage {stowage.__version__}"),
        (["plna"], 2, "error: No such command 'plna'"),
        (["show", "--colour"], 2, "error: No such option: --colour"),
        (["show"], 1, "is not inside a Stowage project: run `stowage init` here"),
        (["gpu", "--help"], 0, "usage: stowage gpu"),
        (["device", "tpu"], 2, "'tpu' is not one of 'cpu', 'cuda'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], status: int, said: str, tmp_path: Path) -> None:
    done = stowage_command(*words, folder=tmp_path)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    if status:
        assert len(done.stderr.strip().splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_completion_knows_commands_and_their_options(tmp_path: Path) -> None:
    def offered(text: str) -> str:
        words = {"COMP_WORDS": text, "COMP_CWORD": str(len(text.split(" ")) - 1), "_STOWAGE_COMPLETE": "complete_bash"}
        code = "import sys; sys.argv = ['stowage']; from stowage.flows.cli.main import run; run()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**stage_environment(ROOT), **words},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    assert "batch-size" in offered("stowage ba")
    assert "--before" in offered("stowage compare --b")


def test_a_package_that_is_missing_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"needs no_such, .* run `pip install 'stowage\[pipeline\]'`"):
        require_extra("no_such", "pipeline")

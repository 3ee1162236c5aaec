"""Stages as processes, killed with SIGKILL: nothing is half-written, and training goes on with the same numbers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_rows
from stowage.stages.train.launch import STARTED_BY
from tests.devices import write_device

PARAMETERS = {
    "trace": {
        "model": {
            "architecture": "gpt2",
            "overrides": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256},
        },
        "batch_size": 2,
        "sequence_length": 16,
        "optimizer": {"name": "AdamW", "arguments": {"lr": 1.0e-2}},
    },
    "profile": {"costs": "roofline"},
    "options": {"max_exact_nodes": 0, "workers": 1, "time_limit_s": 1.0},
    "solve": {"device_budget": "90%", "memory_slots": 50},
    "train": {
        "steps": 60,
        "checkpoint_every": 4,
        "compare_eager": False,
        "measure_every": 1,
        "schedule": {"name": "CosineAnnealingLR", "arguments": {"T_max": 60}},
    },
}
PLANNING = ("trace", "profile", "partition", "options", "solve", "codegen")
RUN = (
    "import runpy, sys\nnames = sys.argv[1:]\nsys.argv = sys.argv[:1]\n"
    "for name in names:\n    runpy.run_module(f'stowage.stages.{name}', run_name='__main__')"
)
TRAINED = ("train", ".stowage")
"""What training leaves in a project."""
KILL = """
import os, runpy, signal, sys
left, replace = int(sys.argv[2]), os.replace
def counted(*paths):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = counted
name = sys.argv[1]
sys.argv = sys.argv[:1]
runpy.run_module(f"stowage.stages.{name}", run_name="__main__")
"""


def run(folder: Path, *stages: str, code: str = RUN, **environment: str) -> subprocess.CompletedProcess[str]:
    """Stages one after the other, in one process."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", code, *stages]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def whole_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that is planned, and trained to the end; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "params.yaml").write_text(yaml.safe_dump(PARAMETERS))
    write_device(folder)
    done = run(folder, *PLANNING, "train")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(whole_project: Path) -> Path:
    """The same."""
    return whole_project


@pytest.fixture(scope="module")
def planned(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same project, not yet trained."""
    folder = tmp_path_factory.mktemp("planned") / "project"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*TRAINED))
    return folder


def losses(folder: Path) -> list[tuple[int, float, float]]:
    records = read_rows(folder / "artifacts" / "train" / "steps.parquet", StepRecord)
    return [(r.iteration, r.loss, r.learning_rate) for r in records]


def kill_in_training(folder: Path, rank: int | None = None) -> str:
    """Train, and kill the process as soon as there is a checkpoint, or one of its ranks; return what was said then."""
    said = folder / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, "train"], cwd=folder, stdout=subprocess.DEVNULL, stderr=file
        )
    deadline = time.monotonic() + 600
    while not list(folder.rglob("checkpoints/**/*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed: train longer"
        time.sleep(0.002)
    os.kill(process.pid if rank is None else process_of_rank(process.pid, rank), signal.SIGKILL)
    assert process.wait() == (-signal.SIGKILL if rank is None else 1)
    return said.read_text()


def process_of_rank(started_by: int, rank: int) -> int:
    """Return the process that is one of the ranks that a process has started."""
    wanted = {f"{STARTED_BY}={started_by}", f"RANK={rank}"}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted <= set(path.read_text(errors="replace").split("\0")):
                return int(path.parent.name)
    raise AssertionError(f"rank {rank} is not there")


def check_that_a_kill_changes_nothing(planned: Path, folder: Path, rank: int | None = None) -> str:
    """A run that was killed, or one rank of it, and goes on has the losses and the weights of one that was not.

    Returns what the run has said when it was killed.
    """
    whole, killed = folder / "whole", folder / "killed"
    for copy in (whole, killed):
        shutil.copytree(planned, copy, ignore=shutil.ignore_patterns(*TRAINED))
    done = run(whole, "train")
    assert done.returncode == 0, done.stderr
    said = kill_in_training(killed, rank)
    done = run(killed, "train")
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(whole)
    final = "artifacts/train/final.safetensors"
    assert (killed / final).read_bytes() == (whole / final).read_bytes()
    return said


def check_whole(folder: Path) -> None:
    """Every file under its own name can be read."""
    for path in (folder / "artifacts").rglob("[!.]*"):
        if path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())


def test_training_that_was_killed_ends_like_training_that_was_not(whole: Path, planned: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(planned, killed)
    kill_in_training(killed)
    assert not (killed / "artifacts" / "train" / "final.safetensors").exists()
    check_whole(killed)

    done = run(killed, "train")
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(whole)
    assert len(losses(whole)) == 60
    final = "artifacts/train/final.safetensors"
    assert (killed / final).read_bytes() == (whole / final).read_bytes()
    assert not list(killed.rglob("checkpoints/**/*.safetensors")), "a finished run leaves no checkpoint"


@pytest.mark.parametrize(("stage", "write"), [("partition", 2), ("solve", 2), ("codegen", 1)])
def test_a_stage_that_was_killed_leaves_whole_files(planned: Path, tmp_path: Path, stage: str, write: int) -> None:
    folder = tmp_path / "project"
    shutil.copytree(planned, folder)
    before = {p: p.read_bytes() for p in (folder / "artifacts").rglob("*") if p.is_file()}
    done = subprocess.run([sys.executable, "-c", KILL, stage, str(write)], cwd=folder, check=False)
    assert done.returncode == -signal.SIGKILL
    check_whole(folder)
    done_again = run(folder, stage)
    assert done_again.returncode == 0, done_again.stderr
    assert {p: p.read_bytes() for p in before} == before, "the same inputs give the same bytes"


def test_errors_are_one_sentence_on_stderr(planned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(planned, folder)
    step = folder / "artifacts" / "codegen" / "step.py"
    step.write_text(step.read_text().replace("aten.", "aten. ", 1))
    done = run(folder, "train")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "is not what codegen wrote" in done.stderr
    assert "Traceback" not in done.stderr
    assert not os.path.exists(folder / "artifacts" / "train" / "steps.parquet")

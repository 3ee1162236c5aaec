"""The torture itself: what it takes for a fault, and that each kind of case works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.torture import forks, judge, mutations
from tests.torture.__main__ import KINDS
from tests.torture.forks import Disturbance, Ended

ROOT = Path(__file__).parents[2]


def said(text: str) -> Callable[[], None]:
    def work() -> None:
        print(text, file=sys.stderr)
        sys.exit(1)

    return work


def raised() -> None:
    raise KeyError("x")


ENDS: dict[str, tuple[Callable[[], None], str]] = {
    "success": (lambda: None, ""),
    "a sentence": (said("progress\nerror: no."), ""),
    "a traceback": (raised, "a traceback"),
    "no sentence": (said("oh"), "no sentence at the end"),
    "nothing": (lambda: sys.exit(3), "no sentence at the end"),
    "too much": (said("error: " + "x" * 5000), "a sentence of"),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGTERM), "ended by signal"),
    "code": (mutations.CANARY.touch, "something ran"),
}


@pytest.mark.parametrize("end", ENDS)
def test_faults_are_seen(tmp_path: Path, end: str) -> None:
    work, fault = ENDS[end]
    found = judge.fault(forks.run(work, tmp_path))
    assert found == fault if not fault else fault in found
    assert not mutations.CANARY.exists()


def test_what_takes_too_long_is_a_fault() -> None:
    assert "it took more than" in judge.fault(Ended(0, "", "", 200.0, too_long=True))


def test_what_is_left_behind_is_seen(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").touch()
    assert judge.left(tmp_path) == ""
    (tmp_path / ".file.0123456789abcdef").touch()
    assert "left behind" in judge.left(tmp_path)


def test_files_may_be_limited(tmp_path: Path) -> None:
    def work() -> None:
        try:
            Path("file").write_bytes(b"x" * 1000)
        except OSError as error:
            print("error:", error.strerror, file=sys.stderr)
            sys.exit(1)

    ended = forks.run(work, tmp_path, Disturbance(file_bytes=100))
    assert (ended.code, ended.said) == (1, "error: File too large\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_arrive(tmp_path: Path, number: signal.Signals) -> None:
    def work() -> None:
        try:
            while True:  # a pause would miss a signal that comes right before it
                time.sleep(0.01)
        except KeyboardInterrupt:
            sys.exit(130)

    ended = forks.run(work, tmp_path, Disturbance(number, 0.2))
    assert ended.code == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_a_seed_gives_the_same_changes() -> None:
    def changes() -> list[str]:
        rng = Random(3)
        content: dict[str, Any] = {"a": {"b": 1, "c": "text"}, "d": 0.5, "e": None}
        return [mutations.mapping(rng, content) for _ in range(30)]

    assert changes() == changes()
    assert len(set(changes())) > 15


@pytest.mark.long
def test_a_case_of_every_kind() -> None:
    command = [sys.executable, "-m", "tests.torture", "--minutes", "30", "--cases", "2", "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert all(kind in done.stdout for kind in KINDS)

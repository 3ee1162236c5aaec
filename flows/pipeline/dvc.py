"""Calls DVC by its command line, in a process of its own; DVC decides what is stale and alone writes `dvc.lock`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stowage.flows.pipeline.extras import PIPELINE, require_extra
from stowage.flows.pipeline.project import stage_environment
from stowage.stages.inputs import state
from stowage.stages.ir.errors import StowageError

BUSY = re.compile(
    r"is busy, it is being blocked by|Unable to acquire lock|is busy and cannot be locked"
    r"|No such file or directory: '.*[/\\]cache[/\\]runs[/\\].*\.tmp'"  # another process was writing it
)
_ADVICE = re.compile(
    r"^To (track the changes|enable auto staging)|^\s*(git add|dvc config) |^Use `dvc push`|^WARNING: '.*' is empty\.$"
)
_NOT_THE_REASON = re.compile(r"^(ERROR: )?failed to reproduce '\S+'?(: failed to run: .*)?$|^Running stage|^> ")
_PREFIX = re.compile(r"^error: (failed to reproduce '\S+': )?", re.IGNORECASE)
_MISSING = re.compile(r"^Parameters '.*' are missing from '\S+'")

_MENDED = 3
"""Number of times that a stage may find inputs that were not listed, one run after the other."""


class StageFailedError(StowageError):
    """Says that a stage ended with an error; the text has the stage's own last words."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module by this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def dvc_command(*arguments: str) -> list[str]:
    """Return the command that runs DVC by this interpreter, so that no other installation of it is picked up.

    Raises:
        MissingExtraError: DVC is not installed for this interpreter.
    """
    require_extra("dvc", PIPELINE)
    return python_command("dvc", *arguments)


def run_quietly(command: Sequence[str], root: Path) -> tuple[int, str]:
    """Run a short command; return its exit status and what it printed, or its complaint if it failed."""
    done = subprocess.run(
        command, cwd=root, env=stage_environment(root), capture_output=True, text=True, errors="replace", check=False
    )
    return done.returncode, done.stdout if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip())


def dvc_output(root: Path, *arguments: str) -> str:
    """Return what a short DVC command prints.

    Raises:
        StowageError: it failed.
    """
    code, said = run_quietly(dvc_command(*arguments), root)
    if code != 0:
        words = (said or "no message").splitlines()[-1].removeprefix("ERROR: ")
        raise StowageError(f"`dvc {' '.join(arguments)}` failed in {root}: {words}")
    return said


def changed_stages(root: Path, stages: Sequence[str]) -> dict[str, Any]:
    """Return stages that are not up to date, with DVC's reasons; one fed by a stale stage counts once that has run."""
    found: dict[str, Any] = json.loads(dvc_output(root, "status", "--json", *stages))
    return found


def reproduce(root: Path, stage: str, log: Callable[[str], None], busy_wait_s: float = 600.0) -> None:
    """Run one stage if it is stale, as `dvc repro --single-item`, passing its output to `log` line by line.

    A stage that found that `dvc.yaml` did not name all its inputs, and has mended that, is run again.

    Args:
        root: folder of the project.
        stage: name of the stage.
        log: receives its output, line by line.
        busy_wait_s: how long to retry while another DVC process is at work in this checkout.

    Raises:
        StageFailedError: the stage, or DVC, ended with an error.
    """
    deadline = time.monotonic() + busy_wait_s
    mended = 0
    while True:
        inputs = state(root)
        code, last_lines = _stream(dvc_command("repro", "--single-item", stage), root, log)
        if code == 0:
            return
        if mended < _MENDED and state(root) != inputs:
            mended += 1
            continue
        if not any(BUSY.search(line) for line in last_lines) or time.monotonic() > deadline:
            raise StageFailedError(f"Stage {stage} failed: {_last_words(last_lines)}")
        log(f"another DVC process is at work in {root}; trying again in 2 s")
        time.sleep(2)


def _stream(command: Sequence[str], root: Path, log: Callable[[str], None]) -> tuple[int, deque[str]]:
    last_lines: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        command,
        cwd=root,
        env=stage_environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            text = line.rstrip()
            if text and not _ADVICE.search(text):
                last_lines.append(text)
                log(text)
        return process.wait(), last_lines
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[str]) -> None:
    """End DVC and the stage that it started: killing DVC alone would leave the stage running."""
    for kind, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return


def _last_words(last_lines: Sequence[str]) -> str:
    said = [line for line in last_lines if not _NOT_THE_REASON.search(line)]
    if not said:
        return "it said nothing; see its log above."
    words = _PREFIX.sub("", said[-1])
    return f"{words.rstrip('.')}: `stowage init` adds them." if _MISSING.match(words) else words

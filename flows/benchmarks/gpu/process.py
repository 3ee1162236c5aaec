"""Runs one piece of work in a process that ends with whoever started it, and prints where it hung."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED_BY = "STOWAGE_STARTED_BY"
"""Environment variable with the number of the process that started this one."""

TELL_S = 1.0
"""Seconds that a process has to print where it hangs, before it is killed."""

KILLED = 9
"""Number of the signal by which the kernel kills where memory is short."""

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def obey() -> None:
    """Let this process end when the one that started it ends; call it first.

    Crashes and SIGUSR1 write where every thread is to standard error.
    """
    with contextlib.suppress(io.UnsupportedOperation):  # standard error is no file
        faulthandler.enable()
    with contextlib.suppress(OSError):  # standard error is closed, or no file
        faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"), all_threads=True)
    started_by = os.environ.get(STARTED_BY)
    if started_by is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(started_by):  # the parent ended before the signal was set
        os._exit(1)


@dataclass(frozen=True)
class Ended:
    """Describes how a process ended.

    Attributes:
        code: exit status, the negative number of a signal that killed it, None where it took too long.
        seconds: wall time.
        lines: the last of what it wrote.
    """

    code: int | None
    seconds: float
    lines: tuple[str, ...]

    def why(self) -> str:
        """Say in one sentence why a process ended otherwise than with status 0."""
        last = next((line.strip() for line in reversed(self.lines) if line.strip()), "no output")[:160]
        if self.code is None:
            return f"stopped after {self.seconds:.0f} s"
        if self.code >= 0:
            return f"ended with exit status {self.code}: {last}"
        name = signal.Signals(-self.code).name if -self.code in {*signal.Signals} else f"signal {-self.code}"
        hint = ", which is the kernel's answer to too little memory" if -self.code == KILLED else ""
        return f"killed by {name}{hint}: {last}"


def run_process(
    command: Sequence[str],
    log: Path,
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    last_lines: int = 40,
) -> Ended:
    """Run a command, with all its output in `log`; at the limit it and all that it started are killed.

    Raises:
        OSError: the command is not there.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {}), STARTED_BY: str(os.getpid())},
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TELL_S)
        finally:  # also kill what it started; Ctrl-C does not reach its session
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - began, last_of(log, last_lines))


def last_of(log: Path, lines: int) -> tuple[str, ...]:
    """Return the last lines of a file, of bounded length; none of a missing file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000 * lines))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(line[:300] for line in text.splitlines()[-lines:])


def answer_of(path: Path) -> dict[str, Any] | None:
    """Return what the process left as JSON; None where there is nothing whole."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return None

"""Keeps processes in which HiGHS solves (`highs_child` says why): one per thread, for one model after another.

Starting Python and loading the library takes longer than solving most models. A process without requests for a few
seconds ends by itself, so that none takes memory from training.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path

_COMMAND = [sys.executable, "-m", "stowage.stages.solver.highs_child"]


class HighsProcess:
    """Runs one process, which starts with the first model and again when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def solve(self, folder: Path, timeout_s: float) -> bool:
        """Solve the model in a folder, and return whether there was an answer in time.

        Raises:
            RuntimeError: HiGHS failed.
        """
        try:
            answer = self._ask(folder, timeout_s)
            if answer == "":  # the process ended while the request was on its way
                self.stop()
                answer = self._ask(folder, timeout_s)
        except BaseException:
            self.stop()
            raise
        if answer is None:
            self.stop()
            return False
        if answer != "solved\n":
            self.stop()
            raise RuntimeError(f"HiGHS failed: {answer.strip() or 'its process ended'}")
        return True

    def stop(self) -> None:
        """Kill the process, with what it was solving."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _ask(self, folder: Path, timeout_s: float) -> str | None:
        """Return the process's answer; None after the time limit, empty if it has ended."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.stop()
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._owner = os.getpid()
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        try:
            asked.write(f"{folder}\n")
            asked.flush()
        except BrokenPipeError:
            return ""
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            return answers.readline() if selector.select(timeout_s) else None


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.process = HighsProcess()


_of_this_thread = _OfThisThread()


def solve_folder(folder: Path, timeout_s: float) -> bool:
    """Solve the model in a folder, in this thread's process."""
    return _of_this_thread.process.solve(folder, timeout_s)


def end_process() -> None:
    """End this thread's process, so that the system counts its time among those of children that have ended."""
    _of_this_thread.process.stop()

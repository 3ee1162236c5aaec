"""A child process that answers each JSON line with one; the contestants of benchmarks live in such processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stowage.flows.pipeline.project import stage_environment
from stowage.stages.ir.errors import StowageError


class Served:
    """Starts a child process, asks it and ends it.

    Args:
        name: its name, for messages.
        module: the module that it runs, as `python -m` does.
        request: its first line.
        root: a folder of the project, where it runs.
        limit_s: the process is ended when an answer takes longer.
        environment: variables besides those of a stage.

    Raises:
        StowageError: the answer is an error, or there is none.
    """

    def __init__(
        self,
        name: str,
        module: str,
        request: Any,
        root: Path,
        *,
        limit_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=root,
            env=stage_environment(root) | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # so that its own workers can be ended with it
        )
        try:
            self.about = self.ask(request)
        except StowageError:
            self.close()
            raise

    def ask(self, request: Any) -> dict[str, Any]:
        """Send one line and wait for its answer.

        Raises:
            StowageError: the answer is an error, or there is none.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(self._process.pid, signal.SIGKILL)

        timer = threading.Timer(self._limit_s or 0, end)
        if self._limit_s is not None:
            timer.start()
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise StowageError(f"{self.name}: no answer within {self._limit_s:.0f} s.")
        if not line:
            raise StowageError(f"The contestant {self.name} ended early (exit code {self._process.wait()}).")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StowageError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()


def serve(set_up: Callable[[Any], tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer requests in the child process until standard input is closed.

    Args:
        set_up: takes the first line, and returns a function that answers all others, and the first answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what libraries print does not mix with answers

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        reply, about = set_up(json.loads(sys.stdin.readline()))
        answer(about)
        for line in sys.stdin:
            answer(reply(json.loads(line)))
    except StowageError as error:
        answer({"error": str(error)})
    except Exception as error:  # a peer that cannot run here has a line in the table too
        lines = [text.strip() for text in str(error).splitlines() if text.strip()]
        answer({"error": f"{type(error).__name__}: {(lines or ['no message'])[0][:200]}"})

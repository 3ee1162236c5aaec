"""`stowage init` asks in a real terminal, takes the answer that is typed, and makes a project of an empty folder."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from pipeline_projects import run

PATIENCE_S = 60


class Terminal:
    """A process with a terminal of its own, as in a window: what it writes, and what is typed."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Read until the process has written a text."""
        before = len(self.text)
        while text not in self.text[before:]:
            if not self._read():
                raise AssertionError(f"it ended without {text!r}, and wrote: {self.text}")

    def type(self, line: str) -> None:
        """Type a line and press Enter."""
        os.write(self._ours, f"{line}\r".encode())

    def press(self, key: bytes) -> None:
        """Press one key once the process waits for it.

        Python hears a signal only at the next key where it comes between the prompt and the wait.
        """
        until = time.monotonic() + PATIENCE_S
        while psutil.Process(self._process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < until, f"it does not wait for a key after: {self.text}"
            time.sleep(0.01)
        os.write(self._ours, key)

    def end(self) -> int:
        """Read what is left, and return the exit status."""
        while self._read():
            pass
        os.close(self._ours)
        return self._process.wait(PATIENCE_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE_S)
        if not ready:
            self._process.kill()
            raise AssertionError(f"nothing came for {PATIENCE_S} s after: {self.text}")
        try:
            found = os.read(self._ours, 65536)
        except OSError:  # Linux says so where the other end is closed
            return False
        self.text += found.decode(errors="replace")
        return bool(found)


def _take_terminal() -> None:
    """Make standard input the terminal that controls this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


INIT = [sys.executable, "-m", "stowage.flows.init", "--device", "cpu"]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty Git repository."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    run(["git", "init", "--quiet"], folder)
    return folder


def test_it_asks_for_the_model_and_takes_what_is_typed(empty: Path) -> None:
    terminal = Terminal(INIT, empty)
    terminal.wait_for("[my_model:build]: ")
    assert {p.name for p in empty.iterdir()} == {".git"}, "nothing is written before the answer"
    terminal.type("network:make")
    assert terminal.end() == 0, terminal.text
    assert "callable: network:make" in (empty / "params.yaml").read_text()
    assert "def make(" in (empty / "network.py").read_text()
    assert (empty / "artifacts" / "device.json").exists()
    assert (empty / ".dvc").is_dir()


def test_enter_takes_the_default_and_a_wrong_answer_is_one_sentence(empty: Path) -> None:
    wrong = Terminal([*INIT, "--dry-run"], empty)
    wrong.wait_for("[my_model:build]: ")
    wrong.type("no such thing!")
    assert wrong.end() == 1
    assert "is neither `module:function`" in wrong.text
    assert "Traceback" not in wrong.text
    dry = Terminal([*INIT, "--dry-run"], empty)
    dry.wait_for("[my_model:build]: ")
    dry.type("")
    assert dry.end() == 0, dry.text
    assert "my_model.py" in dry.text
    assert {p.name for p in empty.iterdir()} == {".git"}


def test_control_c_at_the_question_leaves_nothing_behind(empty: Path) -> None:
    terminal = Terminal(INIT, empty)
    terminal.wait_for("[my_model:build]: ")
    terminal.press(b"\x03")
    assert terminal.end() != 0
    assert "Traceback" not in terminal.text
    assert {p.name for p in empty.iterdir()} == {".git"}


def test_it_does_not_ask_where_nobody_can_answer(empty: Path) -> None:
    done = subprocess.run(INIT, cwd=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "[my_model:build]" not in done.stdout + done.stderr

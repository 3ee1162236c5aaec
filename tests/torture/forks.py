"""A case as a process of its own, forked from one that has imported everything: no case leaves anything in the next."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LONGEST_S = 180.0


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit status; negative for the signal that ended it.
        said: on stderr.
        shown: on stdout.
        too_long: it was ended because it took too long.
    """

    code: int
    said: str
    shown: str
    took_s: float
    too_long: bool = False


@dataclass(frozen=True)
class Disturbance:
    """A signal after so many seconds, or a limit on the size of files; neither for an undisturbed run."""

    signal: int = 0
    after_s: float = 0.0
    file_bytes: int | None = None


UNDISTURBED = Disturbance()


def run(work: Callable[[], None], folder: Path, disturbance: Disturbance = UNDISTURBED) -> Ended:
    """Run `work` in `folder`."""
    began = time.monotonic()
    pipes = [os.pipe() for _ in range(2)]  # no files: these may be limited
    pid = os.fork()
    if pid == 0:
        _child(work, folder, [write for _, write in pipes], disturbance)
    heard = {read: bytearray() for read, _ in pipes}
    for _, write in pipes:
        os.close(write)
    sent = too_long = ended = False
    while not ended:
        done, status = os.waitpid(pid, os.WNOHANG)
        ended = bool(done)
        if ended:
            _end_group(pid)
        now = time.monotonic() - began
        if not ended and disturbance.signal and not sent and now >= disturbance.after_s:
            _send(pid, disturbance.signal)
            sent = True
        if not ended and now > LONGEST_S:
            too_long = True
            _send(pid, signal.SIGKILL)
        while ready := select.select(list(heard), [], [], 0 if ended else 0.002)[0]:
            pieces = {read: os.read(read, 1 << 16) for read in ready}
            for read, piece in pieces.items():
                heard[read] += piece
            if not any(pieces.values()):
                break
    for read in heard:
        os.close(read)
    shown, said = (content.decode(errors="replace") for content in heard.values())
    return Ended(os.waitstatus_to_exitcode(status), said, shown, time.monotonic() - began, too_long)


def _send(pid: int, number: int) -> None:
    """To the process and to those that it has started, as a terminal does, or `kill -9` of all."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _end_group(pid: int) -> None:
    """Of helpers that a killed process has left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(work: Callable[[], None], folder: Path, outputs: list[int], disturbance: Disturbance) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        for number, handle in zip((1, 2), outputs):
            os.dup2(handle, number)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        if disturbance.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (disturbance.file_bytes, disturbance.file_bytes))
        os.chdir(folder)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

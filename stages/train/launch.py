"""Starts the train stage once for each rank, by `torchrun`, and ends them together.

What the ranks say comes from rank 0 alone; if one fails, the sentence is that of the rank that failed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from stowage.stages.ir.errors import ParameterError, StowageError

STARTED_BY = "STOWAGE_RANKS_STARTED_BY"
"""Environment variable with the number of the process that started the ranks."""
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_ERRORS = "stderr.log"
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGAIN = "run it again, and it goes on from its last checkpoint"


def is_rank(ranks: int) -> bool:
    """Return whether this process is one of several that `torchrun` has started.

    Raises:
        ParameterError: it has started another number of them.
    """
    if "RANK" not in os.environ:
        return False
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise ParameterError(
            f"torchrun has started {started} processes, and trace.ranks is {ranks}: make them agree, or run the stage "
            "alone, which starts as many as it needs."
        )
    return ranks > 1


def obey() -> None:
    """Let this rank end when the process that started the ranks ends, however that happens."""
    started_by = os.environ.get(STARTED_BY)
    if started_by is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(started_by):  # it ended before the signal was set
        os._exit(1)


def launch(module: str, ranks: int, environment: Mapping[str, str] | None = None) -> None:
    """Run `python -m module` once for each rank, as `torchrun --standalone` does, until all have ended.

    Args:
        module: the module to run.
        ranks: how many processes to start.
        environment: variables for them besides those of this process.

    Raises:
        StowageError: one of them failed; the others were ended.
    """
    # As many threads as here, since costs were measured so; torchrun would make it one.
    given = {"OMP_NUM_THREADS": str(torch.get_num_threads()), STARTED_BY: str(os.getpid()), **(environment or {})}
    with _as_before(given), tempfile.TemporaryDirectory(prefix="stowage-ranks-") as folder:
        words = ["--standalone", f"--nproc-per-node={ranks}", "--redirects=2", f"--log-dir={folder}", "-m", module]
        try:
            run(parse_args(words))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            raise StowageError(_first_words(error, Path(folder))) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise StowageError(f"{ranks} ranks were ended by {error.sigval.name}.") from None
        for path in sorted(Path(folder).rglob(f"0/{_ERRORS}")):
            sys.stderr.write(path.read_text(errors="replace"))


@contextlib.contextmanager
def _as_before(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put back what torchrun leaves changed in the process that calls it."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    log = logging.getLogger("torch.distributed.elastic")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a sentence says it instead
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        log.setLevel(level)
        if threading.current_thread() is threading.main_thread():  # torchrun sets them nowhere else
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _first_words(error: ChildFailedError, folder: Path) -> str:
    """Return what the rank that failed first has said last: the others lost it in the middle of a collective."""
    said: list[tuple[float, int, str]] = []
    for rank, failure in error.failures.items():
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # by which torchrun ends the others
            return f"Rank {rank} was ended by {failure.signal_name()}: {_AGAIN}."
        for path in folder.rglob(f"{failure.local_rank}/{_ERRORS}"):
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith("error: ")]
            if lines:
                said.append((path.stat().st_mtime, rank, lines[-1].removeprefix("error: ")))
    if not said:
        rank, failure = error.get_first_failure()
        return f"Rank {rank} ended with exit status {failure.exitcode} and said nothing: {_AGAIN}."
    _, rank, sentence = min(said)
    return sentence if rank == 0 else f"Rank {rank}: {sentence}"

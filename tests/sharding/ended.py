"""Runs a program on each rank, one of which is killed, hangs or fails, and tells how each rank has ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sharding.ranks import MARK, ROOT

LIMIT_S = 240.0
END_S = 60.0
"""Within this time after one rank is lost, the others have ended."""

AT = 3
"""The iteration in which it is lost."""


@dataclass
class Ended:
    """How one rank has ended, and what it has said."""

    code: int
    said: list[Any]
    text: str

    @property
    def losses(self) -> dict[int, float]:
        """Return the losses by iteration."""
        return {said["iteration"]: said["loss"] for said in self.said if "loss" in said}

    @property
    def error(self) -> dict[str, Any]:
        """Return what it has said of an error; nothing without one."""
        return next((said for said in self.said if "error" in said), {})


def run(
    folder: Path,
    how: str,
    *,
    at: int = AT,
    ranks: int = 2,
    timeout_s: float = 0.0,
    where: str = "scatter",
    module: str = "tests.sharding.failing",
) -> list[Ended]:
    """Run a module on each rank until all have ended by themselves; a rank that hangs is killed at the end.

    Args:
        folder: for what it writes.
        how: what becomes of one rank: `killed`, `hangs`, `fails`, or `goes on`.
        at: the iteration in which that happens.
        ranks: number of ranks.
        timeout_s: of the process group; 0 for the default one.
        where: before which collective it happens.
        module: see `failing`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    outputs = [folder / f"said by {rank}" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(folder), str(timeout_s), how, str(at), where],
                    cwd=ROOT,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + LIMIT_S
    try:
        lost = failing_rank(where, ranks) if how == "hangs" else -1
        for process in (process for rank, process in enumerate(processes) if rank != lost):
            process.wait(max(1.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [ended_of(p.returncode, output.read_text()) for p, output in zip(processes, outputs, strict=True)]


def failing_rank(where: str, ranks: int) -> int:
    """Return which rank fails: of buffers the first, which sends them and waits for nobody."""
    return 0 if where == "buffer" else ranks - 1


def ended_of(code: int, text: str) -> Ended:
    """Return how a rank has ended from its exit status and what it wrote."""
    said = [json.loads(line[len(MARK) :]) for line in text.splitlines() if line.startswith(MARK)]
    return Ended(code, said, text)


def event(ended: Ended) -> float:
    """Return the time at which the rank failed."""
    return float(next(said["at"] for said in ended.said if "event" in said))

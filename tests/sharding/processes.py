"""Runs a function on several ranks: one process each, with a group of gloo on this machine, all of them ended in time.

    losses = on_ranks(2, train, "gpt2")     # [train("gpt2") of rank 0, train("gpt2") of rank 1]

The function and its arguments are pickled: it is one of a module, not of another function. Inside, `dist.get_rank()`
tells the ranks apart. An error on any rank fails the test with that rank's traceback; `outcomes` returns errors.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_S = 60
"""A collective that waits longer for another rank raises an error."""

SECONDS = 420
"""Ranks that take longer are killed: these machines are slow, and run more than one thing."""


@dataclass(frozen=True)
class Outcome:
    """What one rank gave.

    Attributes:
        result: what its function returned; None after an error.
        error: the error's class and text; "" without one.
        trace: the error's traceback.
        took_s: how long the function ran.
    """

    result: Any
    error: str = ""
    trace: str = ""
    took_s: float = 0.0


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
    """Return what `work(*arguments)` gives on each rank.

    Raises:
        AssertionError: a rank raised an error, was killed, or took too long.
    """
    found = outcomes(count, work, *arguments, seconds=seconds)
    wrong = [f"rank {rank}: {outcome.trace or outcome.error}" for rank, outcome in enumerate(found) if outcome.error]
    assert not wrong, "\n".join(wrong)
    return [outcome.result for outcome in found]


def outcomes(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
    seconds: float = SECONDS,
    collective_s: float = COLLECTIVE_S,
) -> list[Outcome]:
    """Return how `work(*arguments)` ended on each rank."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        start = mp.get_context("spawn")
        ranks = [
            start.Process(target=_rank, args=(rank, count, folder, collective_s, work, arguments), daemon=True)
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + seconds
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0.1))
        late = [rank for rank in ranks if rank.is_alive()]
        for rank in late:
            rank.kill()
            rank.join()
        return [
            _read(folder / str(number), f"killed after {seconds:g} s" if rank in late else f"exit code {rank.exitcode}")
            for number, rank in enumerate(ranks)
        ]


def _read(path: Path, otherwise: str) -> Outcome:
    if not path.is_file():
        return Outcome(None, otherwise)
    found: Outcome = pickle.loads(path.read_bytes())
    return found


def _rank(
    rank: int, count: int, folder: Path, collective_s: float, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.cpu_count = lambda: 1  # as in tests/conftest.py: plans are solved in this process
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=collective_s),
        )
        began = time.monotonic()
        outcome = Outcome(work(*arguments), took_s=time.monotonic() - began)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        outcome = Outcome(None, text, traceback.format_exc(), time.monotonic() - began)
    partial = folder / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(folder / str(rank))
    if dist.is_initialized() and not outcome.error:
        dist.destroy_process_group()

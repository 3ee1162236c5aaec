"""Train on ranks until one of them is killed, hangs or fails, and save on the way.

`python -m tests.sharding.failing FOLDER TIMEOUT HOW AT WHERE` on each rank; one of them does what `HOW` says in
iteration `AT`, when it is about to scatter gradients, to gather weights, or to hand out buffers (`WHERE`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stowage.stages.ir.errors import StowageError
from stowage.stages.runtime.sharding.iteration import ShardedIteration
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.sharding.ended import failing_rank
from tests.sharding.ranks import say
from tests.sharding.resuming import WHOLE, Training

STEPS, EVERY = 6, 2


VERBS: dict[str, tuple[type, str]] = {
    "scatter": (ShardedIteration, "scatter"),
    "gather": (ShardedIteration, "gather"),
    "buffer": (Ranks, "broadcast"),
}
"""What is replaced to fail there."""


class Failing:
    """Fails in the middle of a step."""

    def __init__(self, how: str, at: int) -> None:
        self._how, self._at = how, at
        self.iteration = -1

    def install(self, owner: type, name: str) -> None:
        """Fail before a method of a class is called."""
        real = getattr(owner, name)

        def failing(*arguments: Any, **keywords: Any) -> Any:
            self._before()
            return real(*arguments, **keywords)

        setattr(owner, name, failing)

    def _before(self) -> None:
        if self.iteration != self._at:
            return
        say({"event": self._how, "at": time.time()})
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "hangs":
            time.sleep(600)
        if self._how == "fails":
            raise ValueError("out of luck")


def _again(run: Training, rank: int) -> Sequence[str]:
    """Return what those are told who go on after a failure."""

    def sentence(work: Any) -> str:
        try:
            work()
        except StowageError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    parameter = run.model.first.weight
    return [
        sentence(lambda: run.train(rank, 0, 1)),
        sentence(lambda: run.save(Path("nowhere"))),
        sentence(lambda: parameter.sum()),
        sentence(run.model.state_dict),
        sentence(run.optimizer.state_dict),
    ]


def main(folder: Path, timeout_s: float, how: str, at: int, where: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=timeout_s)) if timeout_s else dist.group.WORLD
    run = Training(folder, WHOLE, shift=0.0, group=group, name=str(rank))
    torch.manual_seed(7 + rank)
    failing = Failing(how, at)
    if rank == failing_rank(where, ranks) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        failing.install(*VERBS[where])
    checkpoint = folder / "checkpoint"
    begin = 0
    if checkpoint.exists():
        run.load(checkpoint)
        begin = int((folder / "iteration").read_text())
    for i in range(begin, STEPS):
        failing.iteration = i
        try:
            say({"iteration": i, "loss": run.train(rank, i, i + 1)[0]})
        except Exception as error:
            say({"error": type(error).__name__, "text": str(error), "at": time.time(), "again": _again(run, rank)})
            raise
        if (i + 1) % EVERY == 0:
            run.save(checkpoint)
            if rank == 0:
                (folder / "iteration").write_text(str(i + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])

"""Measures rates of a tier in use, alone and beside computing: what a plan may count on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from stowage.stages.device.tiers.base import Tier


@dataclass(frozen=True)
class TierRate:
    """Transfers of one kind, over one stretch of time.

    Attributes:
        what: `write`, `read` or `both`.
        bytes_per_s: transferred bytes per second, of both directions summed.
        cpu_s_per_gb: processor time of the whole process for 1e9 bytes; computing beside it not counted.
        compute_slowdown: time of the computing beside it, over its time alone; 1 when there was none.
    """

    what: str
    bytes_per_s: float
    cpu_s_per_gb: float
    compute_slowdown: float


_Named: TypeAlias = Sequence[tuple[str, torch.Tensor]]


class _Beside:
    """Computes in a loop in the calling thread, until told to stop."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._stop = threading.Event()
        self.rounds = 0

    def run(self, seconds: float) -> float:
        """Compute for at least `seconds`, or until `stop`, at least one round; return the rounds per second."""
        self.rounds = 0
        start = time.perf_counter()
        while not self.rounds or (time.perf_counter() - start < seconds and not self._stop.is_set()):
            self._work()
            self.rounds += 1
        self._stop.clear()
        return self.rounds / (time.perf_counter() - start)

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()


def measure_tier(
    tier: Tier,
    tensors: Sequence[torch.Tensor],
    *,
    rounds: int = 3,
    compute: Callable[[], object] | None = None,
) -> list[TierRate]:
    """Offload `tensors`, reload them, and do both at once, `rounds` times each; beside `compute`, in a loop, if given.

    Half of the tensors go each way when both run. The slots are `rate0`, `rate1`, … and everything is transferred once
    before anything is timed, so that first use of the tier's memory is not in the numbers.
    """
    names = [f"rate{index}" for index in range(len(tensors))]
    tier.reserve({name: t.numel() * t.element_size() for name, t in zip(names, tensors, strict=True)})
    pairs = list(zip(names, tensors, strict=True))

    def move(down: _Named, up: _Named) -> None:
        started = [tier.offload(*pair) for pair in down] + [tier.reload(*pair) for pair in up]
        for transfer in started:
            transfer.wait()

    move(pairs, [])
    half = len(pairs) // 2
    alone, alone_cpu_s = 1.0, 0.0
    beside = _Beside(compute) if compute is not None else None
    if beside is not None:
        beside.run(0.2)
        cpu = time.process_time()
        alone = beside.run(1.0)
        alone_cpu_s = (time.process_time() - cpu) / beside.rounds

    def measured(what: str, down: _Named, up: _Named) -> TierRate:
        ended: list[float] = []

        def transfers() -> None:
            for _ in range(rounds):
                move(down, up)
            ended.append(time.perf_counter())
            if beside is not None:
                beside.stop()

        nbytes = rounds * sum(tensor.numel() * tensor.element_size() for _, tensor in [*down, *up])
        mover = threading.Thread(target=transfers)
        cpu, start = time.process_time(), time.perf_counter()
        mover.start()
        speed = beside.run(float("inf")) if beside is not None else alone
        mover.join()
        cpu = time.process_time() - cpu - (beside.rounds * alone_cpu_s if beside is not None else 0.0)
        return TierRate(what, nbytes / (ended[0] - start), cpu / nbytes * 1e9, alone / speed)

    return [measured("write", pairs, []), measured("read", [], pairs), measured("both", pairs[:half], pairs[half:])]

"""Remembers losses, times and memory of a training step's iterations, for its report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.runtime.observe.measure import Measurement
from stowage.stages.train.loop import memory_samples

MOST = 10_000
"""Number of iterations that are remembered, the latest."""

PENDING = 64
"""Number of iterations whose loss and time may still be unread: to read them sooner would wait for a GPU."""


@dataclass
class _Pending:
    """An iteration whose loss and time are not numbers yet; `clock` times it."""

    iteration: int
    loss: Any
    clock: Any
    learning_rate: float


class History:
    """The latest iterations, with the memory or time of one that was measured.

    Attributes:
        memory: memory of the latest iteration that was measured.
        spans: time spans of the latest iteration that was traced, and the predicted ones.
    """

    def __init__(self) -> None:
        self.memory: Sequence[MemorySample] = ()
        self.spans: Sequence[TraceSpan] = ()
        self._known: deque[StepRecord] = deque(maxlen=MOST)
        self._pending: deque[_Pending] = deque()
        self._count = 0

    def measured(self, found: Measurement) -> None:
        """Keep the memory of an iteration."""
        self.memory = memory_samples("measured", found)

    @contextmanager
    def timed(self, device: torch.device | None, optimizer: torch.optim.Optimizer | None) -> Iterator[list[Any]]:
        """Time an iteration, whose loss the caller puts into the list; one that fails is not remembered."""
        found: list[Any] = []
        clock = _CudaClock() if device is not None and device.type == "cuda" else _Clock()
        rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None and _has_rate(optimizer) else 0.0
        yield found
        clock.stop()
        loss = found[0].detach().as_subclass(torch.Tensor).clone()  # its number is read later: a step asks for none
        self._pending.append(_Pending(self._count, loss, clock, rate))
        self._count += 1
        while len(self._pending) > PENDING:
            self._resolve()

    def _resolve(self) -> None:
        p = self._pending.popleft()
        nan = float("nan")
        self._known.append(StepRecord(p.iteration, float(p.loss), nan, p.learning_rate, p.clock.seconds(), nan, -1))

    def records(self) -> list[StepRecord]:
        """Return the iterations in order; on a GPU this waits for the latest."""
        while self._pending:
            self._resolve()
        return list(self._known)


class _Clock:
    def __init__(self) -> None:
        self._start = self._end = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def seconds(self) -> float:
        return self._end - self._start


class _CudaClock:
    """Times by events on the current CUDA stream."""

    def __init__(self) -> None:
        event: Any = torch.cuda.Event
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


def _has_rate(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups) and isinstance(optimizer.param_groups[0].get("lr"), int | float | torch.Tensor)

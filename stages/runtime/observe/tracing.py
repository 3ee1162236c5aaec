"""Records a real iteration in time: steps, waits and updates as generated code reports them, copies as the tier does.

Nothing is recorded unless asked for; a step of the cycle that is recorded costs one reading of a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.run import TraceSpan

Result = TypeVar("Result")

PATIENCE_S = 30.0
"""Seconds to wait, at the end of the iteration, for copies that are under way."""


class _Clock(Protocol):
    def now(self) -> Any: ...

    def seconds(self, mark: Any) -> float: ...


class _HostClock:
    """The clock of the CPU, `time.perf_counter`."""

    def now(self) -> Any:
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        return float(mark)


class _DeviceClock:
    """The clock of a GPU: events on its current stream, on the scale of `time.perf_counter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero = self.now()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def now(self) -> Any:
        event: Any = torch.cuda.Event
        made = event(enable_timing=True)
        made.record(torch.cuda.current_stream(self._device))
        return made

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return self._zero_s + 1e-3 * float(self._zero.elapsed_time(mark))


class IterationRecorder:
    """Records when steps, waits and updates of one iteration begin and end."""

    def __init__(self, device: torch.device) -> None:
        self._clock: _Clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
        self._steps: list[tuple[str, Any]] = []
        self._marks: list[tuple[PlanAction, str, Any, Any]] = []
        self._end: Any = None

    def begin(self, label: str) -> None:
        """Begin a step of the cycle, which ends the one before."""
        self._steps.append((label, self._clock.now()))

    @contextmanager
    def span(self, stream: PlanAction, name: str) -> Iterator[None]:
        """Record something inside of a step."""
        start = self._clock.now()
        yield
        self._marks.append((stream, name, start, self._clock.now()))

    def end(self) -> None:
        """End the last step."""
        self._end = self._clock.now()

    def absolute(self) -> list[TraceSpan]:
        """Return what was recorded, on the scale of `time.perf_counter`."""
        if not self._steps or self._end is None:
            return []
        ends = [*(mark for _, mark in self._steps[1:]), self._end]
        seconds = self._clock.seconds
        steps = [
            TraceSpan("measured", "compute", label, 0, seconds(mark), seconds(end))
            for (label, mark), end in zip(self._steps, ends)
        ]
        marks = [
            TraceSpan("measured", stream, name, 0, seconds(start), seconds(end))
            for stream, name, start, end in self._marks
        ]
        return steps + marks


class _Offloading(Protocol):
    def record(self, on: bool) -> None: ...

    def let_finish(self, seconds: float) -> None: ...

    def recorded(self) -> list[TraceSpan]: ...


class _Traceable(Protocol):
    recorder: IterationRecorder | None

    @property
    def device(self) -> torch.device: ...

    @property
    def offloading(self) -> _Offloading | None: ...


def trace_iteration(program: _Traceable, work: Callable[[], Result]) -> tuple[Result, list[TraceSpan]]:
    """Run `work`, which runs one iteration of `program`; return its result and the iteration's spans.

    The spans include copies that an earlier iteration began and this one waited for, and the whole of copies that this
    one began.
    """
    offloading = program.offloading
    recorder = program.recorder = IterationRecorder(program.device)
    if offloading is not None:
        offloading.record(True)
    try:
        result = work()
        found = recorder.absolute()
        moved: list[TraceSpan] = []
        if offloading is not None:
            offloading.let_finish(PATIENCE_S)
            moved = offloading.recorded()
    finally:
        program.recorder = None
        if offloading is not None:
            offloading.record(False)
    began = min((s.start_s for s in found), default=0.0)
    found += [s for s in moved if s.end_s > began]
    return result, [TraceSpan(s.series, s.stream, s.name, s.nbytes, s.start_s - began, s.end_s - began) for s in found]

"""Tables that `train` writes."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.actions import PlanAction


@dataclass(frozen=True)
class StepRecord:
    """One training iteration.

    Attributes:
        iteration: 0 first.
        loss: after the iteration's forward.
        eager_loss: plain PyTorch's, NaN when not compared.
        learning_rate: rate of the first parameter group in this iteration.
        time_s: wall time.
        eager_time_s: plain PyTorch's, NaN when not compared.
        peak_bytes: measured from the allocator's events, on a GPU by its statistics; -1 when not measured.
        requested_bytes, reserved_bytes, retries: on a GPU, the most that its allocator was asked for and reserved, and
            how often it had to give everything back first; else -1.
    """

    iteration: int
    loss: float
    eager_loss: float
    learning_rate: float
    time_s: float
    eager_time_s: float
    peak_bytes: int
    requested_bytes: int = -1
    reserved_bytes: int = -1
    retries: int = -1


@dataclass(frozen=True)
class MemorySample:
    """One allocator event of the measured iteration: device bytes after it.

    Attributes:
        series: `measured` or `eager`.
        time_s: seconds from the start of the iteration.
        resident_bytes: device bytes after the event, everything included.
    """

    series: str
    time_s: float
    resident_bytes: int


@dataclass(frozen=True)
class TraceSpan:
    """One stretch of one stream in one iteration.

    Attributes:
        series: `predicted` or `measured`.
        stream: `compute` for a step of the cycle, `wait` where it waits for another stream; copies; updates, wherever
            they run.
        name: name of the step, the tensor, or the parameter.
        nbytes: bytes transferred; 0 where nothing is.
        start_s, end_s: from the start of the iteration; negative for a copy that the iteration before began.
    """

    series: str
    stream: PlanAction
    name: str
    nbytes: int
    start_s: float
    end_s: float

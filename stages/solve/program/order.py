"""Describes an order of executions with what it costs, counted without the referee."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.solve.program.chain import Execution


@dataclass(frozen=True)
class Order:
    """The executions of one iteration in which everything stays on the device.

    Attributes:
        method: how it was found.
        executions: the executions in order.
        time_s, peak_bytes: its costs, the same numbers as the referee's.
        options: (block, option) of the schedules that it is made of; empty where no option was needed.
    """

    method: str
    executions: list[Execution]
    time_s: float
    peak_bytes: int
    options: frozenset[tuple[int, int]] = frozenset()

"""Holds what the simulator finds about a step of several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.parallel import ParallelMachine


@dataclass(frozen=True)
class ParallelOutcome:
    """The result of simulating one step.

    Attributes:
        time_s: time of the step, all micro-batches and the update.
        device_bytes: most bytes in the memory of one device.
        host_bytes: bytes in the host's memory, of all ranks together.
        update_s: the update's part of the time.
    """

    time_s: float
    device_bytes: int
    host_bytes: int
    update_s: float = 0.0

    def lacks(self, machine: ParallelMachine) -> str:
        """Return which memory does not suffice on a machine: "device", "host", or nothing."""
        if self.device_bytes > machine.device_bytes:
            return "device"
        return "host" if self.host_bytes > machine.host_bytes else ""

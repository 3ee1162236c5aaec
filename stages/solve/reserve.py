"""Leaves a part of the budget to the device's allocator, as `DeviceDescription.reserve_bytes` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import NO_PLAN
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.summary import Solved


class Reserve:
    """Divides one budget between the plan and the allocator.

    Attributes:
        nbytes: bytes that are left to the allocator.
        usable_bytes: bytes that a plan may take.
    """

    def __init__(self, target: DeviceDescription, budget_bytes: int, trace: TraceTables, said: str = "") -> None:
        """Divide a budget.

        Args:
            target: the device.
            budget_bytes: the budget of the device.
            trace: the trace of the step.
            said: how the budget was found, if it was not given in bytes.
        """
        self._target, self._budget_bytes, self._storages = target, budget_bytes, len(trace.storages)
        self._said = said
        self.nbytes = target.reserve_bytes(budget_bytes, self._storages)
        self.usable_bytes = budget_bytes - self.nbytes

    def stated(self, solved: Solved) -> Solved:
        """Return the plan, which says what it leaves, and how the budget was found."""
        if (solved.summary.reserve_bytes, solved.summary.budget_found) == (self.nbytes, self._said):
            return solved
        return replace(solved, summary=replace(solved.summary, reserve_bytes=self.nbytes, budget_found=self._said))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Let a block plan within `usable_bytes`.

        Raises:
            Infeasible: the error names the whole budget.
        """
        try:
            yield
        except NO_PLAN as error:
            if not self.nbytes:
                raise
            raise error.of(self._budget_bytes, self._whole_bytes(error.smallest_feasible_bytes)) from None

    def _whole_bytes(self, usable_bytes: int) -> int:
        """Return the budget of which a plan may take so much: the reserve is in part a share of the budget."""
        whole_bytes = usable_bytes
        for _ in range(60):
            whole = usable_bytes + self._target.reserve_bytes(whole_bytes, self._storages)
            if whole <= whole_bytes:
                break
            whole_bytes = whole
        return whole_bytes

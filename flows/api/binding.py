"""From a plan to a program that runs: weights find their first place, and the executor does the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from stowage.flows.api.late_weights import LateWeights
from stowage.flows.planning.planned import Planned
from stowage.stages.device.tiers import Tier
from stowage.stages.runtime import Program
from stowage.stages.runtime.executors.base import MakeExecutor
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.structure.tree import ModuleTree
from stowage.stages.trace import Outside


@dataclass(frozen=True)
class Execution:
    """What executes the plans of one model.

    Attributes:
        executor: makes the executor.
        open_tier: opens the tier below the device; None where plans may not use one.
        late: weights that are still in files.
    """

    executor: MakeExecutor = SingleDevice
    open_tier: Callable[[], Tier] | None = None
    late: LateWeights | None = None


class Binding:
    """Makes programs of the plans of one model and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        execution: Execution,
        tree: ModuleTree | None = None,
    ) -> None:
        """`tree`: of the model, where others look at it too."""
        self._late = execution.late
        self._executor = execution.executor(model, optimizer, execution.open_tier, tree)

    @property
    def offloading(self) -> Offloading | None:
        """The tier below the device, once a plan has used it."""
        return self._executor.offloading

    def bind(self, planned: Planned, outside: Outside, *, trains: bool = True) -> Program:
        """Make the program of a plan.

        Args:
            planned: a training step, or a forward alone.
            outside: tensors of neither model nor batch.
            trains: it is a training step.
        """
        plan = planned.executable()
        if self._late is not None and trains:
            self._late.load(self._executor.open(plan), planned.slots)
        return self._executor.bind(plan, outside, trains=trains)

    def take_over(self, other: Binding) -> None:
        """Go on with what another binding of the same model has below the device."""
        self._executor.take_over(other._executor)

    def tracing(self) -> AbstractContextManager[None]:
        """Let modules be called whose weights may be below: a trace reads none."""
        return self.offloading.lending() if self.offloading is not None else nullcontext()

    def layouts(self) -> dict[str, torch.Tensor]:
        """How parameters lie that are not in memory."""
        late = self._late.layouts if self._late is not None else {}
        return late | (self.offloading.layouts() if self.offloading is not None else {})

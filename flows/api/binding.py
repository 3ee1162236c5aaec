"""Makes a program that runs of a plan: loads weights that are still in files, then calls the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from stowage.flows.api.late_weights import LateWeights
from stowage.flows.planning.planned import Planned
from stowage.stages.device.tiers import Tier
from stowage.stages.runtime import Program
from stowage.stages.runtime.executors.base import MakeExecutor
from stowage.stages.runtime.executors.sharded import ShardedDevice
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.structure.tree import ModuleTree
from stowage.stages.trace import Outside


@dataclass(frozen=True)
class ExecutionChoice:
    """Settings for executing the plans of one model.

    Attributes:
        executor: makes the executor.
        open_tier: opens the lower tier; None where plans may not use one.
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
        execution: ExecutionChoice,
        tree: ModuleTree | None = None,
    ) -> None:
        """Make the executor; `tree` is the model's module tree, where other objects use it too."""
        self._late = execution.late
        self._executor = execution.executor(model, optimizer, execution.open_tier, tree)

    @property
    def offloading(self) -> Offloading | None:
        """Return the offloading to the lower tier, or None while no plan has used it."""
        return self._executor.offloading

    def bind(self, planned: Planned, outside: Outside, *, trains: bool = True) -> Program:
        """Make the program of a plan.

        Args:
            planned: a training step, or a forward alone.
            outside: tensors that belong to neither model nor batch.
            trains: the plan is of a training step.
        """
        plan = planned.executable()
        if self._late is not None and trains:
            self._late.load(self._executor.open(plan), planned.slots)
        return self._executor.bind(plan, outside, trains=trains)

    def changes(self) -> dict[str, str]:
        """Return what ranks compare before they bind: which parameters the model has lost or got since."""
        found = self._executor.changes() if isinstance(self._executor, ShardedDevice) else ""
        return {"change of the model": found} if found else {}

    def undo(self) -> None:
        """Give ranks their parameters back whole, where these are dealt out; all ranks call this together."""
        if isinstance(self._executor, ShardedDevice):
            self._executor.undo()

    def take_over(self, other: Binding) -> None:
        """Take over what another binding of the same model has offloaded."""
        self._executor.take_over(other._executor)

    def lend(self, names: Iterable[str] | None) -> AbstractContextManager[None]:
        """Let parameters and states be whole and in device memory inside: by default all."""
        return self._executor.lend(names)

    def contents(self) -> Contents:
        """Return access to parameters, buffers and optimizer states, wherever they are."""
        return self._executor.contents()

    def tracing(self) -> AbstractContextManager[None]:
        """Let modules be called whose weights may be offloaded: a trace reads no contents."""
        return self._executor.tracing()

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return the layouts of parameters that are not in memory."""
        late = self._late.layouts if self._late is not None else {}
        offloaded = self.offloading.layouts() if self.offloading is not None else {}
        return late | offloaded | self._executor.layouts()

"""Holds what is planned, and how: the arguments that travel through all of planning, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.planning.effort import Effort
from stowage.flows.planning.freezing import Freezing
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.solve import LowerTier, PlanRequest
from stowage.stages.trace import MicroBatch, Recorded
from stowage.stages.workload.calls import Loss, Objective

Progress = Callable[[str], None]
"""Receives each stage's name as it starts."""

Part = Callable[[int, int], None]
"""Receives how many parts of a stage are done, of how many."""


@dataclass(frozen=True, eq=False)
class Leave:
    """Leave to keep values for backward in fewer bits.

    Attributes:
        lossy: which kinds of codes, and the limit.
        errors: measures what kinds do to the gradient of a step as it was recorded.
    """

    lossy: Lossy
    errors: Callable[[TraceTables, Lossy], list[GradientError]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepToPlan:
    """A training step that is to be planned.

    Attributes:
        model: see `fit`.
        batch: see `fit`; not read where the step is recorded.
        loss: see `fit`.
        optimizer: has the model's parameters.
        objective: `objective(model, batch)`, instead of `loss`, for those who call the model themselves.
        recorded: forward and backward of this batch, if traced before.
        micro_batch: what happens to gradients; by default they go into updates at once.
        largest: the micro-batch whose peak in plain PyTorch a budget in percent is of; by default `micro_batch`.
        layouts: layouts of parameters that are not in memory, see `trace_step`.
        leave: leave to keep values for backward in fewer bits; None where every number must be plain PyTorch's.
    """

    model: nn.Module
    batch: Any = None
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | KnownOptimizer | None = None
    objective: Objective | None = None
    recorded: Recorded | None = None
    micro_batch: MicroBatch | None = None
    largest: MicroBatch | None = None
    layouts: Mapping[str, torch.Tensor] | None = None
    leave: Leave | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Costing:
    """How the operations of a step get their costs.

    Attributes:
        stores: the folder of the stores.
        effort: how much time measuring and planning may take.
        costs: `measured` or `roofline`.
        target: the device; by default this machine's.
        notices: receives what the user should know.
        progress: called with each stage's name as it starts.
        profiled: called with the operations that have costs, and how many there are.
        freeze: what steps may freeze; None where nothing is ever frozen.
    """

    stores: Path
    effort: Effort = field(default_factory=Effort)
    costs: str = "measured"
    target: DeviceDescription | None = None
    notices: list[str] = field(default_factory=list)
    progress: Progress = lambda stage: None
    profiled: Part = lambda done, total: None
    freeze: Freezing | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Planning(Costing):
    """How plans of a step are found, within any budget.

    Attributes:
        method: see `fit`.
        lower_tier: the lower tier, if plans may use one.
        offloaded_at_rest: see `PlanRequest`.
        part: called with the blocks that have schedules, and how many there are.
        lossy: see `PlanRequest`.
    """

    method: str = "auto"
    lower_tier: LowerTier | None = None
    offloaded_at_rest: frozenset[str] = frozenset()
    part: Part = lambda done, total: None
    lossy: bool = False

    def request(self, budget_bytes: int, target: DeviceDescription) -> PlanRequest:
        """Return what is asked of the solvers for one budget on a device."""
        return PlanRequest(
            device_budget_bytes=budget_bytes,
            method=self.method,
            slots=self.effort.slots,
            device=target.name,
            device_fingerprint=target.fingerprint,
            options_limits=self.effort.solver,
            o_ilp_limits=self.effort.o_ilp,
            o_ilp_searches=self.effort.o_ilp_searches,
            eviction_rules=self.effort.eviction_rules,
            lower_tier=self.lower_tier,
            offloaded_at_rest=self.offloaded_at_rest,
            lossy=self.lossy,
        )

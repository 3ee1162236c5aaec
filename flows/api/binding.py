"""From a plan to a program that runs: bound to the model, its optimizer, and the tier below."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from stowage.flows.api.late_weights import LateWeights
from stowage.flows.api.lower_tier import LowerTier
from stowage.flows.planning.planned import Planned
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.observe.resident import resident_limit
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.structure.tree import ModuleTree
from stowage.stages.trace import Outside


class Binding:
    """Of one model and optimizer.

    Attributes:
        offloading: the tier below the device, once a plan has used it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        late: LateWeights | None,
        lower: LowerTier | None,
        tree: ModuleTree | None = None,
    ) -> None:
        """`tree`: of the model, where others look at it too."""
        self._tree = tree
        self._model = model
        self._optimizer = optimizer
        self._late = late
        self._lower = lower
        self._room_bytes = 0
        self.offloading: Offloading | None = None

    def bind(self, planned: Planned, outside: Outside) -> Program:
        """The program of a plan; `outside` are tensors of neither model nor batch."""
        offloading = self.offloading_for(planned)
        if self._late is not None:
            self._late.load(offloading, planned.slots)
        return bind(
            planned.source,
            planned.manifest.source_hash,
            str(planned.folder / "step.py"),
            planned.trace,
            self._model,
            self._optimizer,
            planned.slots,
            offloading,
            outside,
            self._tree,
        )

    def tracing(self) -> AbstractContextManager[None]:
        """Modules are called whose weights may be below: a trace reads none."""
        return self.offloading.lending() if self.offloading is not None else nullcontext()

    def layouts(self) -> dict[str, torch.Tensor]:
        """How parameters lie that are not in memory."""
        late = self._late.layouts if self._late is not None else {}
        return late | (self.offloading.layouts() if self.offloading is not None else {})

    def offloading_for(self, planned: Planned) -> Offloading | None:
        """One tier for all programs of the model, opened when the first plan needs it."""
        room_bytes = planned.summary.device_budget_bytes
        if self.offloading is None and planned.slots and self._lower is not None:
            tier = self._lower.open()
            limit = resident_limit(self._model, self._optimizer, room_bytes)
            self.offloading = Offloading(tier, self._model, self._optimizer, limit)
            self._room_bytes = room_bytes
        elif self.offloading is not None and room_bytes > self._room_bytes > 0:
            self.offloading.allow(room_bytes - self._room_bytes)
            self._room_bytes = room_bytes
        return self.offloading

"""Executes plans on one device: the lower tier is opened once, and every plan of the model is bound to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from stowage.stages.device.tiers import Tier
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.executors.base import ExecutablePlan, Executor
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.observe.resident import resident_limit
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.program import MakeIteration, Program
from stowage.stages.structure.tree import ModuleTree


class SingleDevice:
    """The executor of one model on the device that it is on; see `Executor`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        open_tier: Callable[[], Tier] | None = None,
        tree: ModuleTree | None = None,
    ) -> None:
        """Open nothing yet; see `MakeExecutor`."""
        self._model = model
        self._optimizer = optimizer
        self._open_tier = open_tier
        self._tree = tree
        self._room_bytes = 0
        self._offloading: Offloading | None = None
        self._without: weakref.WeakSet[Program] = weakref.WeakSet()
        """Programs that were made before the tier was opened."""
        self._surroundings: MakeIteration = SingleIteration

    @property
    def offloading(self) -> Offloading | None:
        """Return the lower tier of this model, once a plan has used it."""
        return self._offloading

    def open(self, plan: ExecutablePlan) -> Offloading | None:
        """Open the tier if this plan is the first that needs it; a plan with a larger budget widens its limit."""
        if self._offloading is None and plan.slots and self._open_tier is not None:
            tier = self._open_tier()
            limit = resident_limit(self._model, self._optimizer, plan.budget_bytes) if plan.budget_bytes else None
            self._offloading = Offloading(tier, self._model, self._optimizer, limit)
            self._room_bytes = plan.budget_bytes
            self._tell(self._offloading)
        elif self._offloading is not None and plan.budget_bytes > self._room_bytes > 0:
            self._offloading.allow(plan.budget_bytes - self._room_bytes)
            self._room_bytes = plan.budget_bytes
        return self._offloading

    def bind(
        self, plan: ExecutablePlan, outside: Mapping[str, torch.Tensor] | None = None, *, trains: bool = True
    ) -> Program:
        """Make a program of a plan; see `Executor`."""
        program = bind(
            plan.source,
            plan.manifest.source_hash,
            str(plan.path),
            plan.trace,
            self._model,
            self._optimizer if trains else None,
            plan.slots,
            self.open(plan),
            outside,
            self._tree if trains else None,
            self._surroundings,
            [unit.name for unit in plan.units],
        )
        if self._offloading is None:
            self._without.add(program)
        return program

    def _tell(self, offloading: Offloading) -> None:
        """Let programs that know of no lower tier fetch from it what others leave there between iterations."""
        for program in self._without:
            program.use_lower_tier(offloading)
        self._without.clear()

    @contextmanager
    def lend(self, names: Iterable[str] | None) -> Iterator[None]:
        """Let parameters and states be in device memory inside, whatever the budget: by default all."""
        if self._offloading is None:
            yield
            return
        here = self._offloading.fetch_all(names)
        try:
            yield
        finally:
            self._offloading.forget_copies(here)

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return the layouts of parameters that are not whole in memory, besides those in the lower tier."""
        return {}

    def tracing(self) -> AbstractContextManager[None]:
        """Let modules be called whose weights may be offloaded: a trace reads no contents."""
        return self._offloading.lending() if self._offloading is not None else nullcontext()

    def contents(self) -> Contents:
        """Return access to parameters, buffers and optimizer states, wherever they are."""
        return Contents(self._model, self._optimizer, self._offloading)

    def take_over(self, other: Executor) -> None:
        """Share the lower tier of another executor of the same model; it serves this optimizer from now on."""
        self._offloading = other.offloading
        if self._offloading is not None and not self._offloading.serves(self._optimizer):
            self._offloading.serve(self._optimizer)

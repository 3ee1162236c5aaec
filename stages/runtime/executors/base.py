"""Defines an executor: it opens the lower tier that a plan needs, and binds the plan's code to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from stowage.stages.device.tiers import Tier
from stowage.stages.ir.plan import Manifest, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.program import Program
from stowage.stages.structure.tree import ModuleTree


@dataclass(frozen=True)
class ExecutablePlan:
    """The parts of a plan that are needed to run it.

    Attributes:
        source: the text of `step.py`.
        manifest: says what the text was made for.
        path: the text's file, as tracebacks show it.
        trace: the traced step that was planned.
        slots: places in the lower tier.
        budget_bytes: what the process may occupy where the device is its own memory; 0 means no limit.
        units: groups of parameters, each of which may be frozen in a run; none where nothing may.
    """

    source: str
    manifest: Manifest
    path: Path
    trace: TraceTables
    slots: Sequence[Slot] = ()
    budget_bytes: int = 0
    units: Sequence[Unit] = ()


class Executor(Protocol):
    """Executes plans of one model and its optimizer.

    To execute plans in another way, write a class like this in a file; `fit(…, executor=…)` takes the class. If a step
    is to do something else than on one device, give its programs another `Iteration` (see `verbs`).
    """

    @property
    def offloading(self) -> Offloading | None:
        """Return the lower tier of this model, once a plan has used it."""

    def open(self, plan: ExecutablePlan) -> Offloading | None:
        """Open the tier if this plan is the first that needs it; all plans of the model share it.

        The caller loads weights that are not in memory yet before it binds a plan, each to where its slot wants it.
        """

    def bind(
        self, plan: ExecutablePlan, outside: Mapping[str, torch.Tensor] | None = None, *, trains: bool = True
    ) -> Program:
        """Make a program of a plan, with its tier open.

        Args:
            plan: the plan to run.
            outside: tensors that belong neither to the model nor to the batch, by the names of the trace.
            trains: True for a training step; False for a forward alone, which updates nothing.

        Raises:
            PlanMismatchError: the code was changed, or the plan is for another model.
        """

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return the layouts of parameters that are not whole in memory, besides those in the lower tier."""

    def lend(self, names: Iterable[str] | None) -> AbstractContextManager[None]:
        """Let parameters and states be whole and in device memory inside, whatever the budget: by default all."""

    def tracing(self) -> AbstractContextManager[None]:
        """Let modules be called whose weights are not in memory: a trace reads no contents."""

    def contents(self) -> Contents:
        """Return access to parameters, buffers and optimizer states, wherever they are."""

    def take_over(self, other: Executor) -> None:
        """Share the lower tier that another executor of the same model has opened; call it before any plan is bound."""


class MakeExecutor(Protocol):
    """Makes the executor of one model; a class whose constructor takes these arguments will do."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        open_tier: Callable[[], Tier] | None = None,
        tree: ModuleTree | None = None,
    ) -> Executor:
        """Make an executor.

        Args:
            model: the model whose plans are executed.
            optimizer: updates the model's parameters; None leaves gradients in `.grad`.
            open_tier: opens the lower tier; None where there is none.
            tree: the model's module tree, if it is shared with others.
        """

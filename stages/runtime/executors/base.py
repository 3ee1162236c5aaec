"""What an executor is: it opens the tier that a plan needs, and binds the plan's code to a model and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from stowage.stages.device.tiers import Tier
from stowage.stages.ir.plan import Manifest, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.program import Program
from stowage.stages.structure.tree import ModuleTree


@dataclass(frozen=True)
class ExecutablePlan:
    """What running a plan takes of it.

    Attributes:
        source: the text of `step.py`.
        manifest: what the text belongs to.
        path: of the text, as tracebacks show it.
        trace: the program that was planned.
        slots: places below the device.
        budget_bytes: what the process may occupy where the device is its own memory; 0 where nobody looks.
    """

    source: str
    manifest: Manifest
    path: Path
    trace: TraceTables
    slots: Sequence[Slot] = ()
    budget_bytes: int = 0


class Executor(Protocol):
    """Executes plans of one model and its optimizer.

    An executor of another kind is one file with a class like this; `fit(…, executor=…)` takes the class. Where a step
    is to do something else than on one device, its programs get another `Iteration` (see `verbs`).
    """

    @property
    def offloading(self) -> Offloading | None:
        """The tier below the device, once a plan has used it."""

    def open(self, plan: ExecutablePlan) -> Offloading | None:
        """Open the tier if this plan is the first that needs it; all plans of the model share it.

        Before a plan is bound, who has weights that are not in memory yet puts them where its slots want them.
        """

    def bind(
        self, plan: ExecutablePlan, outside: Mapping[str, torch.Tensor] | None = None, *, trains: bool = True
    ) -> Program:
        """Make a program of a plan, with its tier open.

        Args:
            plan: what is to run.
            outside: tensors that belong neither to the model nor to the batch, by the names of the trace.
            trains: it is a training step; else a forward alone, which updates nothing.

        Raises:
            PlanMismatchError: the code was changed, or the plan is for another model.
        """

    def take_over(self, other: Executor) -> None:
        """Go on with the tier that another executor of the same model has, before anything is bound."""


class MakeExecutor(Protocol):
    """Makes the executor of one model: the class of one that takes these arguments will do."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        open_tier: Callable[[], Tier] | None = None,
        tree: ModuleTree | None = None,
    ) -> Executor:
        """Make an executor.

        Args:
            model: whose plans are executed.
            optimizer: which updates its parameters; None leaves gradients in `.grad`.
            open_tier: opens the tier below the device; None where there is none.
            tree: of the model, where others look at it too.
        """

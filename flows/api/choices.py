"""Arguments that `fit` and `stow` share: how to plan, check and execute a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stowage.flows.api.arguments import check_arguments
from stowage.flows.api.check.when import Check
from stowage.flows.api.freeze import Freeze
from stowage.flows.api.offload import Offload
from stowage.flows.api.steps import MOST, NewShapes, Say
from stowage.stages.ir.lossy import Lossy
from stowage.stages.runtime.executors.base import MakeExecutor
from stowage.stages.runtime.executors.single import SingleDevice


def print_notice(text: str) -> None:
    """Print a notice to the standard error, as is done by default."""
    print(text, file=sys.stderr)


@dataclass(frozen=True)
class Choices:
    """The budgets of a run, and settings to plan, check and execute it; the attributes are arguments of `fit`."""

    device_budget: str | int
    method: str = "auto"
    offload: Offload = field(default_factory=Offload)
    cache_dir: str | Path | None = None
    quick: bool = False
    check: Check = "powers"
    new_shapes: NewShapes = "plan"
    programs: int = MOST
    executor: MakeExecutor = SingleDevice
    say: Say = print_notice
    group: Any = None
    freeze: Freeze | None = None
    lossy: Lossy | None = None

    def __post_init__(self) -> None:
        """Check the attributes.

        Raises:
            ParameterError: one is of another kind than it must be.
        """
        check_arguments(
            device_budget=self.device_budget,
            method=self.method,
            cache_dir=self.cache_dir,
            quick=self.quick,
            new_shapes=self.new_shapes,
            programs=self.programs,
            say=self.say,
            lossy=self.lossy,
        )

"""Trains recipes on several ranks with masks that change, and beside it DistributedDataParallel with the same masks.

In plain PyTorch the masks set `requires_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stowage.flows import Freeze, fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.ir.units import Unit
from tests.freezing.beside import units_in
from tests.freezing.frozen import masks
from tests.sharding import planned_beside_ddp
from tests.sharding.codes_beside_ddp import in_codes
from tests.sharding.planned_beside_ddp import Compared, compare
from tests.sharding.recipes import Recipe

UPDATES = 10


@dataclass
class Changing:
    """A policy of a user: other masks in each step, at most `most` units at once; or always one, once it is given.

    Attributes:
        most: number of units that train at most; None for all.
        fixed: what trains from now on.
    """

    most: int | None = None
    fixed: list[str] = field(default_factory=list)

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Return the units of a step."""
        if self.fixed:
            return self.fixed
        return self.mask([Unit(name, ()) for name in dynamics], step)

    def mask(self, units: Sequence[Unit], step: int) -> list[str]:
        """Return the mask of a step."""
        return list(masks(units, step + 1))[step][: self.most_active(len(units))]

    def most_active(self, units: int) -> int:
        """Return the number of units that train at most."""
        return units if self.most is None else self.most


def unused_too(model: nn.Module) -> nn.Module:
    """Wrap a model so that parameters may be without gradient, others in each step."""
    return DistributedDataParallel(model, find_unused_parameters=True)


@dataclass
class Masked:
    """Trains in plain PyTorch by the masks of a policy, with the units of a step that is planned meanwhile."""

    policy: Changing
    steps: list[TrainingStep] = field(default_factory=list)

    def fit(self, *given: Any, **named: Any) -> TrainingStep:
        """Plan, and remember the step."""
        self.steps.append(fit(*given, **named))
        return self.steps[-1]

    def train(
        self,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        ddp: nn.Module,
        *,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        iterations: int = UPDATES,
        together: Any = None,
    ) -> Iterator[float]:
        """Train, and yield the losses."""
        del together
        units = units_in(self.steps[0])
        parameters = dict(getattr(ddp, "module", ddp).named_parameters())
        for iteration in range(iterations):
            active = self.policy.mask(units, iteration)
            frozen = [parameters[name] for unit in units if unit.name not in active for name in unit.parameters]
            for parameter in frozen:
                parameter.requires_grad_(False)
            trains = any(p.requires_grad for p in parameters.values())
            for part in range(accumulate):
                last = part == accumulate - 1
                waits: Any = nullcontext() if last else ddp.no_sync()  # type: ignore[operator]
                with waits, torch.set_grad_enabled(trains):
                    loss = planned_beside_ddp.loss_of(
                        recipe, ddp, recipe.batch(planned_beside_ddp.numbers(iteration, part))
                    )
                    if trains:
                        loss.backward()  # type: ignore[no-untyped-call]
                yield loss.item()
            if max_grad_norm is not None:
                norm = nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
                planned_beside_ddp.NORM[0] = float(norm)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in frozen:
                parameter.requires_grad_(True)


def frozen_beside_ddp(
    name: str,
    optimizer: str,
    budget: str | int,
    stores: Path,
    *,
    kind: UnitKind = "saving",
    iterations: int = UPDATES,
    more: Mapping[str, Any] | None = None,
    codes: bool = False,
    see: Callable[[TrainingStep], None] = lambda step: None,
    **arguments: Any,
) -> Compared:
    """Train on this rank and beside DistributedDataParallel; then measure a step in which the worst mask trains.

    With `codes` plain PyTorch keeps in codes what the plan does; `see` is shown the step that has trained.
    """
    policy = Changing()
    masked = Masked(policy)

    def look(step: TrainingStep) -> None:
        policy.fixed = list(step.plan.worst_units)
        see(step)

    with patch.object(planned_beside_ddp, "fit", masked.fit):
        return compare(
            name,
            optimizer,
            budget,
            stores,
            iterations=iterations,
            reference=in_codes(name, masked.steps, masked.train) if codes else masked.train,
            wrap=unused_too,
            more={"freeze": Freeze(policy=policy, units=kind), **(more or {})},
            look=look,
            **arguments,
        )

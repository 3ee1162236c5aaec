"""Lets a reference of several ranks keep in codes what a plan keeps in codes, by hooks of saved tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.plan import Option
from stowage.stages.rewrite import is_asked
from stowage.stages.rewrite.lossy import described
from stowage.stages.solve import PlanRequest, Solved, Variant, solve_variants
from stowage.stages.trace import trace_step
from tests.rewrite.packed_by_hooks import Chosen, hooked
from tests.sharding import planned_beside_ddp
from tests.sharding.recipes import RECIPES, Recipe

Train = Callable[..., Iterator[float]]


def first_lossy(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, *known: object) -> Solved:
    """Take the first lossy plan, whether it is the fastest or not."""
    del known
    chosen = next(v for v in variants if is_asked(v.name))
    solved = solve_variants([chosen], options, replace(request, max_gradient_error=math.inf, rewrite=""))
    lossy, error = described(variants[0].trace, chosen.name, request.errors)
    return replace(solved, summary=replace(solved.summary, lossy=lossy, gradient_error=error))


def in_codes(name: str, steps: Sequence[TrainingStep], train: Train) -> Train:
    """Return a reference that trains a recipe as `train` does, with the codes of the first of some planned steps."""

    def reference(recipe: Recipe, optimizer: torch.optim.Optimizer, ddp: nn.Module, **more: Any) -> Iterator[float]:
        with torch.random.fork_rng():
            alone = RECIPES[name]()
            trace = trace_step(alone.model, alone.batch(0), loss=alone.loss)
        chosen = Chosen.of(trace, steps[0].plan.variant)
        assert chosen.packed
        plain = planned_beside_ddp.loss_of

        def loss(recipe: Recipe, model: nn.Module, batch: Any) -> torch.Tensor:
            with hooked(chosen):
                return plain(recipe, model, batch)

        with patch.object(planned_beside_ddp, "loss_of", loss):
            yield from train(recipe, optimizer, ddp, **more)

    return reference

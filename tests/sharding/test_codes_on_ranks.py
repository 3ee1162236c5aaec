"""Two ranks whose plan keeps values in codes train like DistributedDataParallel with the same codes in its hooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from stowage.flows import Lossy, fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.plan import Option
from stowage.stages.rewrite import is_asked
from stowage.stages.rewrite.lossy import described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.solve import PlanRequest, Solved, Variant, solve_variants
from stowage.stages.trace import trace_step
from tests.rewrite.packed_by_hooks import Chosen, hooked
from tests.sharding import planned_beside_ddp
from tests.sharding.planned_beside_ddp import Compared, compare, train_ddp
from tests.sharding.processes import on_ranks
from tests.sharding.recipes import RECIPES, Recipe


def _first_lossy(
    variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, *known: object
) -> Solved:
    """Take the first lossy plan, whether it is the fastest or not."""
    del known
    chosen = next(v for v in variants if is_asked(v.name))
    solved = solve_variants([chosen], options, replace(request, max_gradient_error=math.inf))
    lossy, error = described(variants[0].trace, chosen.name, request.errors)
    return replace(solved, summary=replace(solved.summary, lossy=lossy, gradient_error=error))


def _compared(name: str, stores: Path) -> tuple[Compared, float]:
    steps: list[TrainingStep] = []

    def kept(*given: Any, **named: Any) -> TrainingStep:
        steps.append(fit(*given, **named))
        return steps[-1]

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
            yield from train_ddp(recipe, optimizer, ddp, **more)

    with (
        patch.object(saved_module, "SMALLEST", 64),
        patch("stowage.flows.planning.step.solve_variants", _first_lossy),
        patch.object(planned_beside_ddp, "fit", kept),
    ):
        lossy = {"lossy": Lossy(["bf16", "int8_tensor"], 0.1)}
        found = compare(name, "adamw", "60%", stores, reference=reference, more=lossy)
    assert not steps[0].plan.exact
    return found, steps[0].plan.gradient_error


def test_two_ranks_with_codes(fit_stores: Path) -> None:
    for rank, (one, error) in enumerate(on_ranks(2, _compared, "gpt2", fit_stores)):
        assert not one.differences, f"rank {rank}: {one.differences}"
        assert one.peak_bytes <= max(1.02 * one.predicted_bytes, one.predicted_bytes + (1 << 14)), rank
        assert 0 < error <= 0.1

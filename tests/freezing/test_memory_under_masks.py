"""Whatever trains takes the memory that the referee says of it, the choice of the solver and any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Freeze, fit
from stowage.stages.freezing.stored import guarded_plan, replayed_tier
from stowage.stages.ir.units import mask_of
from tests.freezing.beside import Given, units_in
from tests.freezing.chosen_kernels import mixer, projected, scan, windows
from tests.zoo import ZOO

DRAWN = 8
"""Pairs of units that are drawn for each model."""


@pytest.mark.parametrize(
    "make", [mixer, windows, projected, scan, *(ZOO[n] for n in ("gpt2", "t5", "resnet", "unet", "batchnorm"))]
)
def test_every_mask_takes_what_is_said_of_it(make: Any, fit_stores: Path) -> None:
    def adamw(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]

    model, batch, loss = make()
    policy = Given(most=2)
    step = fit(
        model,
        batch,
        adamw,
        device_budget="200%",
        loss=loss,
        freeze=Freeze(policy=policy),
        cache_dir=fit_stores,
        check="never",
        quick=True,
        say=lambda text: None,
    )
    units = [unit.name for unit in units_in(step)]
    plan, summary = step.planned, step.plan
    guarded = guarded_plan(plan.trace, plan.nodes, plan.rows, plan.slots, plan.units)
    tier = replayed_tier(guarded, summary.baseline_bytes)
    first = [units[i : i + 2] for i in range(0, len(units), 2)]  # so that all have states
    draws = random.Random(0)
    masks = [
        *([unit] for unit in units),
        *(draws.sample(units, min(2, len(units))) for _ in range(DRAWN)),
        list(summary.worst_units),
    ]
    assert step.frozen is not None
    assert step.frozen.schedule is not None
    policy.masks = [*[[]] * step.frozen.schedule.step, *first, *masks]
    for _ in first:
        step(batch)
    for mask in masks:
        said = guarded.under(mask_of(plan.units, mask)).replay(tier=tier).peak_bytes
        assert said <= summary.device_peak_bytes
        peak_bytes = step.measure(batch).peak_bytes
        assert peak_bytes <= said <= 1.02 * peak_bytes, mask

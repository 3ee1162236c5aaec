"""Plans for which few units train at once: bits under masks that change, memory under masks worst elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, TrainingStep, fit
from stowage.stages.formulations.freezing.worst_mask import worst_mask
from stowage.stages.freezing.levels import levels_of
from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.stored import guarded_plan
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.units import ALWAYS, bit, names_in
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.workload.samples import sample_batch
from tests.configurations.alongside import batches, small_gpt2
from tests.freezing.beside import Given, assert_equal_to_plain, units_in

Fit = Callable[..., Any]

ROWS_APART = 3
"""So many rows' own worst masks are run besides the worst of all."""


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, say=lambda text: None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def outputs_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def plan_of(step: TrainingStep) -> Guarded:
    """Return the rows of a step's plan with their guards."""
    found = step.planned
    return guarded_plan(found.trace, found.nodes, found.rows, found.slots, found.units)


def test_two_units_at_once_equal_plain_pytorch_where_the_plan_recomputes(quick: Fit) -> None:
    """Ten masks, each of two units at most, dropout on, states of what is frozen untouched."""
    model, plain, policy = small_gpt2(), small_gpt2(), Given(most=2)
    given = batches(model, 3)
    step = quick(model, given[0], adamw, device_budget="62%", freeze=Freeze(policy=policy))
    assert step.plan.recomputed_bytes > 0
    assert step.plan.active_units == 2 < step.plan.units
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), outputs_loss, given, updates=10)
    assert len({tuple(sorted(mask)) for mask in policy.masks}) >= 6


@pytest.mark.parametrize("budget", ["150%", "60%"])
def test_masks_that_are_worst_at_other_rows_fit_too(budget: str, quick: Fit) -> None:
    """What each takes is what its own rows say, below what the worst of all takes, and within the budget."""
    model, policy = small_gpt2(n_layer=4, n_positions=64), Given(most=2)
    batch = sample_batch(model, 8, 64, 0)
    step = quick(model, batch, adamw, device_budget=budget, freeze=Freeze(policy=policy))
    units = units_in(step)
    names = [unit.name for unit in units]
    turns = [names[i : i + 2] for i in range(0, len(names), 2)]  # states begin with a unit's first update
    policy.masks = [*turns, turns[0]]
    for _ in turns:
        step(batch)
    levels, plan = levels_of(plan_of(step)), step.plan
    found: dict[int, int] = {}
    for level in levels:
        worst = worst_mask([level], len(units), 2, SolverSettings(20.0))
        found.setdefault(worst.mask, max(each.under(worst.mask) for each in levels))
    overall = max(found, key=found.__getitem__)
    assert found[overall] == plan.device_peak_bytes
    others = sorted((mask for mask in found if mask != overall), key=found.__getitem__, reverse=True)
    assert len(others) >= ROWS_APART
    apart = [others[0], others[len(others) // 2], others[-1]]
    for mask in (overall, *apart):
        policy.masks[-1] = list(names_in(units, mask))
        peak = step.measure(batch).peak_bytes
        assert peak <= plan.device_peak_bytes + MIB / 64
        assert peak <= plan.device_budget_bytes
        assert abs(peak - found[mask]) <= max(0.02 * found[mask], MIB / 64), policy.masks[-1]
    assert any(found[mask] < found[overall] for mask in apart)


@pytest.mark.parametrize("most", [2, 3])
def test_the_time_that_is_stated_is_the_mean_over_all_masks(most: int, quick: Fit) -> None:
    model, policy = small_gpt2(), Given(most=most)
    step = quick(model, batches(model, 1)[0], adamw, device_budget="62%", freeze=Freeze(policy=policy))
    plan, count = plan_of(step), step.plan.units
    masks = [ALWAYS | sum(map(bit, chosen)) for chosen in combinations(range(count), most)]
    times = [plan.under(mask).replay().time_s for mask in masks]
    assert len(set(times)) > 1
    assert step.plan.step_time_s == pytest.approx(fsum(times) / len(times))
    assert step.plan.step_time_s < step.plan.all_active_time_s

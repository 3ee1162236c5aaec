"""`fit` on a machine whose CPU updates beside the device: clipped and accumulated gradients wait in the host for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.flows.api import fit as _fit
from stowage.flows.api.lower_tier import OpenableTier
from stowage.stages.device.tiers import PinnedTier
from stowage.stages.ir.machine import Link
from stowage.stages.solve import LowerTier
from tests.configurations.alongside import Plain, assert_measured, batches, small_gpt2
from tests.configurations.test_offloaded_gradients import adamw, assert_alike
from tests.device.tiers.thread_lanes import ThreadLanes

CLIPPED = 0.5


def model() -> nn.Module:
    """With weights that are worth moving."""
    return small_gpt2(n_embd=128, n_positions=64)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fitted(
    given: list[Any], stores: Path, make: Callable[[Any], torch.optim.Optimizer] = adamw, **how: Any
) -> TrainingStep:
    """With RAM in the place of pinned memory."""
    lower_tier = LowerTier(Link(2e9, 2e9), 1 << 40, cpu_update_bytes_per_s=2e10)
    lower = OpenableTier(lower_tier, lambda: PinnedTier(lanes=ThreadLanes()))
    state = 4 * sum(p.nbytes for p in model().parameters())
    with mock.patch.object(_fit, "lower_tier_for", return_value=lower):
        return fit(
            model(),
            given[0],
            make,
            device_budget=int(0.4 * state),
            method="offmate",
            cache_dir=stores,
            quick=True,
            say=lambda text: None,
            **how,
        )


def gradients_taken(step: TrainingStep) -> list[str]:
    """Roles of the gradients that updates by the CPU take in the plan that updates."""
    planned = next(k.planned for k in step.programs.known if k.micro_batch.update)
    nodes = [planned.nodes[r.node] for r in planned.rows if r.action == "update"]
    found = [max(set(n.reads) - set(n.mutates), key=lambda s: planned.trace.storages[s].nbytes) for n in nodes]
    return [planned.trace.storages[s].role for s in found]


@pytest.mark.parametrize("make", [adamw, momentum])
def test_clipped(make: Callable[[Any], torch.optim.Optimizer], fit_stores: Path) -> None:
    given = batches(model(), 6)
    step = fitted(given, fit_stores, make, max_grad_norm=CLIPPED)
    assert gradients_taken(step).count("temporary") >= 3
    eager = model()
    assert_alike(step, Plain(eager, make(eager.parameters()), max_grad_norm=CLIPPED), given[:5], [True] * 5)
    assert_measured(step, given[5])


@pytest.mark.parametrize("max_grad_norm", [None, CLIPPED])
def test_accumulated(max_grad_norm: float | None, fit_stores: Path) -> None:
    """Gradients that waited in `.grad` are used up by the CPU too."""
    given = batches(model(), 8)
    step = fitted(given, fit_stores, max_grad_norm=max_grad_norm, accumulate=2)
    assert gradients_taken(step).count("gradient") >= 3
    eager = model()
    plain = Plain(eager, adamw(eager.parameters()), max_grad_norm=max_grad_norm)
    assert_alike(step, plain, given[:7], [i % 2 == 1 for i in range(7)])
    assert_measured(step, given[7])

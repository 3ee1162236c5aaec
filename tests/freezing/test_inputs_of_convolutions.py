"""The input of a convolution waits for backward only if its weight trains, or something else reads it there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stowage.flows import Freeze, fit
from stowage.flows.benchmarks.slimfit.saved import kept_plan, saved_bytes
from stowage.stages.ir.units import ALWAYS, bit
from stowage.stages.trace import trace_step
from tests.freezing.beside import Given, assert_equal_to_plain, assert_worst_measured

SIZE = 12


class Convolutions(nn.Module):
    """SiLU keeps its input for backward, so that a convolution alone needs what SiLU returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def test_it_is_saved_under_the_weights_guard_alone() -> None:
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = trace_step(model, (batch(),), loss=lambda value, _: value, optimizer=optimizer)
    plan, border, _ = kept_plan(trace)
    saved = saved_bytes(plan, border)
    names = [unit.parameters[0] for unit in plan.units]
    first, third = (bit(names.index(f"layers.{i}.weight")) for i in (0, 2))
    one_bytes = 4 * 8 * SIZE * SIZE * 4
    assert saved.under(ALWAYS | first | third) - saved.under(ALWAYS | first) == one_bytes
    assert len([one for own in plan.guards.stand_ins.values() for one in own]) == 3


def test_training_equals_plain_and_the_peak_is_as_predicted(fit_stores: Path) -> None:
    def adamw(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]

    def loss(model: nn.Module, given: object) -> torch.Tensor:
        found: torch.Tensor = model(given)
        return found

    model, plain, policy = Convolutions(), Convolutions(), Given(most=1)
    step = fit(
        model,
        batch(),
        adamw,
        device_budget="200%",
        loss=lambda value, _: value,
        freeze=Freeze(policy=policy),
        cache_dir=fit_stores,
        quick=True,
        say=lambda text: None,
    )
    assert "empty_strided" in step.planned.source
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), loss, [batch()], updates=6)
    assert_worst_measured(step, policy, batch())

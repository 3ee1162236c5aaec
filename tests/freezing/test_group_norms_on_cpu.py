"""On a CPU a group normalisation always computes the gradient of its input: without it, PyTorch ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.device import device_of
from stowage.stages.ir.flags import asked_for
from stowage.stages.profile.measure import measure_call
from stowage.stages.trace import trace_step
from tests.freezing.beside import Given, assert_worst_measured, freeze, units_in
from tests.runtime.beside_eager import differences, same

BACKWARD = "aten.native_group_norm_backward.default"


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3))
    return model.to(memory_format=torch.channels_last)


def images() -> torch.Tensor:
    return torch.randn(4, 8, 24, 24).contiguous(memory_format=torch.channels_last)


def square(output: torch.Tensor, _: object = None) -> torch.Tensor:
    return output.square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("first", [True, False])
def test_what_nothing_reads_is_workspace(first: bool) -> None:
    """Also where the traced step itself reads it nowhere."""
    model = convolutions()
    model[0].requires_grad_(not first)
    trace = trace_step(model, images(), loss=square, optimizer=adamw(model))
    (call,) = (c for c in trace.calls if c.target == BACKWARD)
    assert asked_for(call.arguments) == (0, 1, 2)
    alone, dx_bytes = measure_call(call, trace, device_of("cpu"), "cpu"), 4 * 16 * 24 * 24 * 4
    assert len(alone.flagged_bytes) == 8
    wanted, left = alone.flagged_bytes[1::2], alone.flagged_bytes[::2]
    assert all(one >= dx_bytes for one in left)
    if not first:
        assert all(one < dx_bytes for one in wanted)


def test_masks_whose_first_unit_is_a_group_norm(tmp_path: Path) -> None:
    """Plain PyTorch ends the process under them; with everything training it makes the same gradients."""
    policy, batch, model, plain = Given(1), images(), convolutions(), convolutions()
    step = fit(
        model,
        batch,
        adamw(model),
        device_budget="300%",
        loss=square,
        freeze=freeze(policy),
        cache_dir=tmp_path,
        quick=True,
    )
    optimizer = adamw(plain)
    names = [unit.name for unit in units_in(step)]
    own = next(unit for unit in units_in(step) if "1.weight" in unit.parameters)
    policy.masks = [[own.name], [names[-1]], [own.name]]
    for active in policy.masks:
        trained = {name for unit in units_in(step) if unit.name in active for name in unit.parameters}
        expected = square(plain(batch))
        torch.autograd.backward(expected)
        for name, parameter in plain.named_parameters():
            parameter.grad = parameter.grad if name in trained else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert same(step(batch).detach(), expected.detach())
        assert differences(model, plain) == []
    peak = step.measure(batch).peak_bytes
    assert peak <= step.plan.device_peak_bytes
    assert_worst_measured(step, policy, batch)

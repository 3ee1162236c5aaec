"""Unsigned fixed point for what is within [0, 1]: which values that are, and how far what is read back is from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import REWRITES
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors, run_trace
from stowage.stages.trace import trace_step
from tests.rewrite.packed_by_hooks import REFERENCE, Chosen, hooked
from tests.zoo import ZOO

KIND, STEP = "fixed8_unit", 1 / 256
ROWS, WIDTH = 32, 64


class Weighted(nn.Module):
    """Multiplies one branch by a function of another, which backward reads."""

    def __init__(self, weights: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = weights
        self.a, self.b = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weights(4 * self.a(x)) * self.b(x)).square().mean()


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def traced(module: nn.Module, x: torch.Tensor) -> TraceTables:
    return trace_step(module, (x,), loss=lambda value, _: value)


def targets(trace: TraceTables) -> list[str]:
    return [trace.calls[site].target for site in REWRITES[KIND].sites(trace)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("weights", "target"),
    [
        (lambda x: F.softmax(x, -1), "aten._softmax.default"),
        (torch.sigmoid, "aten.sigmoid.default"),
        (lambda x: F.softmax(x.double(), -1).to(x.dtype), "aten._to_copy.default"),
    ],
    ids=["softmax", "sigmoid", "copy"],
)
def test_gradients_are_those_of_hooks(
    weights: Callable[[torch.Tensor], torch.Tensor], target: str, dtype: torch.dtype
) -> None:
    module, reference, x = Weighted(weights, dtype), Weighted(weights, dtype), batch(dtype)
    trace = traced(module, x)
    assert targets(trace) == [target]
    plain_loss, plain = run_trace(trace, StepTensors.of(module, (x,)))
    packed = REWRITES[KIND].everywhere(trace)
    loss, found = run_trace(packed, StepTensors.of(module, (x,)))
    assert torch.equal(loss, plain_loss)
    with hooked(Chosen.of(trace, KIND)) as mode:
        reference(x).backward()
    assert mode.used
    assert all(torch.equal(p.grad, found[n]) for n, p in reference.named_parameters() if p.grad is not None)
    assert not all(torch.equal(plain[n], g) for n, g in found.items())
    (codes,) = [s for s in packed.storages[len(trace.storages) :] if s.name.endswith("_codes")]
    assert codes.nbytes == ROWS * WIDTH


@pytest.mark.parametrize(
    ("weights", "packed"),
    [
        (torch.tanh, []),
        (torch.exp, []),
        (F.hardtanh, []),
        (lambda x: F.log_softmax(x, -1), []),
        (lambda x: torch.sigmoid(x).detach().mul_(2), []),
        (lambda x: (2 * torch.sigmoid(x)).detach(), []),
        (lambda x: 2 * torch.sigmoid(x), ["aten.sigmoid.default"]),
    ],
    ids=["tanh", "exp", "hardtanh", "log_softmax", "written into", "larger", "larger, made again"],
)
def test_what_may_be_outside_is_not_packed(weights: Callable[[torch.Tensor], torch.Tensor], packed: list[str]) -> None:
    """The sigmoid itself may be, where backward reads it."""
    assert targets(traced(Weighted(weights), batch())) == packed


def test_what_is_read_back_is_within_half_a_step() -> None:
    """Only above the largest code, 255/256, it is farther: 1 is a whole step away."""
    x = torch.cat([torch.linspace(0, 1, 100_001), torch.rand(1000)])
    back = REFERENCE[KIND](x)
    away = (back - x).abs()
    assert float(away[x <= 1 - STEP].max()) <= STEP / 2
    assert float(away.max()) == STEP
    assert torch.equal(back * 256, (back * 256).round())
    assert float(back.min()) == 0.0
    assert float(back.max()) == 255 / 256


def test_attentions_of_models_are_candidates_and_better_kept_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are 16 times finer than SlimFit's of other values, of the same bits."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, data, loss = ZOO["gpt2"]()
    trace = trace_step(model, data, loss=loss)
    assert len(REWRITES[KIND].sites(trace)) == 3, "one of each layer"
    live = [StepTensors.of(model, data)]
    errors = {(e.kind, e.tensors): e.squared_error for e in gradient_errors(trace, [KIND, "fixed8"], live)}
    own = [name for kind, name in errors if kind == KIND]
    assert own
    for name in own:
        assert "softmax" in name
        assert errors[KIND, name] < errors["fixed8", name]
    assert 0 < gradient_error(trace, REWRITES[KIND].everywhere(trace), live) <= sum(errors[KIND, n] for n in own) ** 0.5

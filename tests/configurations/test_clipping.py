"""Clipping by global norm: `torch.nn.utils.clip_grad_norm_`, spread over the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.updates import CLIP, NORM, UPDATE
from stowage.stages.runtime.clipping import apply_scale, clip_scale
from stowage.stages.workload.randomness import seeded
from tests.configurations.alongside import Plain, assert_equal, assert_measured, batches, small_gpt2
from tests.matrix import some
from tests.runtime.beside_eager import same

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="150%", say=lambda text: None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3, float("inf")])
def test_the_numbers_of_torch(dtypes: tuple[torch.dtype, ...], max_norm: float) -> None:
    torch.manual_seed(0)
    shapes = [(7, 5), (1,), (64, 33), (3, 4, 5), (2,)]
    gradients = [torch.randn(s).to(dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]
    gradients[2] = gradients[2].t()
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = [torch.ops.aten._foreach_norm.Scalar([g], 2.0)[0] for g in gradients]
    found, scale = clip_scale(norms, max_norm)
    assert same(found, expected)
    for parameter, gradient in zip(parameters, gradients):
        apply_scale([gradient], scale)
        assert torch.equal(gradient, parameter.grad)


@pytest.mark.parametrize("max_grad_norm", some([0.1, 1e4, float("inf")], keep=[0.1]))
def test_equal_to_eager(max_grad_norm: float, quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 5)
    step = quick(model, given[0], adamw, max_grad_norm=max_grad_norm, method="rockmate", device_budget="90%")
    plain = Plain(other, adamw(other.parameters()), max_grad_norm=max_grad_norm)
    assert_equal(step, plain, given, [True] * 5)
    assert step.plan.recomputed_bytes > 0
    assert_measured(step, given[0])


def test_no_update_starts_before_the_last_gradient(quick: Fit) -> None:
    model = small_gpt2()
    step = quick(model, batches(model, 1)[0], adamw, max_grad_norm=1.0)
    planned = step.planned
    calls = [planned.trace.calls[c].target for r in planned.rows if r.node >= 0 for c in planned.nodes[r.node].calls]
    assert calls.count(CLIP) == 1
    assert calls.count(NORM) == calls.count(UPDATE) == len(list(model.parameters()))
    assert max(i for i, c in enumerate(calls) if c == NORM) < calls.index(CLIP) < calls.index(UPDATE)
    assert calls[calls.index(CLIP) + 1 :] == [UPDATE] * calls.count(UPDATE)
    text = planned.source
    assert "scale = run.clip(norms, 1.0)" in text
    assert ", scale)  # end" in text


def test_the_extra_bytes_are_in_the_plan(quick: Fit) -> None:
    """Without clipping each gradient goes as soon as it is complete; with it all wait for the last."""
    model = small_gpt2(n_positions=16)
    batch = batches(model, 1, rows=1, length=4)[0]
    peaks = [
        quick(small_gpt2(n_positions=16), batch, adamw, max_grad_norm=norm).plan.device_peak_bytes
        for norm in (None, 1.0)
    ]
    gradients = sum(p.nbytes for p in model.parameters())
    assert peaks[1] > peaks[0] + gradients / 4


def test_a_gradient_that_is_not_finite(quick: Fit) -> None:
    with seeded(0):
        model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    other.load_state_dict(model.state_dict())
    x = torch.full((2, 4), float("inf"))

    def total(outputs: Any, batch: Any) -> torch.Tensor:
        del batch
        result: torch.Tensor = outputs.sum()
        return result

    step = quick(model, (x,), adamw, loss=total, max_grad_norm=1.0)
    plain = Plain(other, adamw(other.parameters()), total, 1.0)
    step((x,))
    plain((x,))
    assert torch.equal(step.grad_norm, plain.norm)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_that_no_update_takes_are_clipped_too(accumulated: bool, quick: Fit) -> None:
    """As `clip_grad_norm_(model.parameters())` does; they stay in `.grad`."""
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 2)

    def biases(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in m.parameters() if p.ndim == 1], lr=0.1)

    step = quick(model, given[0], biases(model), max_grad_norm=0.1)
    plain = Plain(other, biases(other), max_grad_norm=0.1)
    assert_equal(step, plain, given, [not accumulated, True], moves=False)
    assert model.get_parameter("transformer.wte.weight").grad is not None


def test_mixed_types(quick: Fit) -> None:
    def build() -> nn.Module:
        with seeded(0):

            class Mixed(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 4)

                def forward(self, x: torch.Tensor) -> Any:
                    return self.high(torch.tanh(self.low(x.bfloat16())).float()).pow(2).mean()

            return Mixed()

    model, other = build(), build()
    given = [(torch.randn(4, 8),) for _ in range(3)]
    step = quick(model, given[0], adamw, max_grad_norm=0.01)
    plain = Plain(other, adamw(other.parameters()), lambda outputs, batch: outputs, 0.01)
    assert_equal(step, plain, given, [True] * 3)


def test_there_is_no_norm_without_clipping(quick: Fit) -> None:
    model = small_gpt2()
    batch = batches(model, 1)[0]
    step = quick(model, batch, adamw)
    step(batch)
    assert step.grad_norm is None


@pytest.mark.parametrize("norm", [0, -1.0, True, "1", float("nan")])
def test_a_limit_that_is_none(norm: Any, quick: Fit) -> None:
    model = small_gpt2()
    with pytest.raises(ParameterError, match="max_grad_norm") as caught:
        quick(model, batches(model, 1)[0], adamw, max_grad_norm=norm)
    assert "\n" not in str(caught.value)


def test_without_an_optimizer_there_is_nothing_to_clip_for(quick: Fit) -> None:
    model = small_gpt2()
    with pytest.raises(ParameterError, match="no optimizer"):
        quick(model, batches(model, 1)[0], max_grad_norm=1.0)

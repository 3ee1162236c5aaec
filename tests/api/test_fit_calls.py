"""What people do with a training step besides calling it again and again with the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import differences, same

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="150%", say=lambda text: None)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mean_square(outputs: Any, batch: Any) -> torch.Tensor:
    del batch
    result: torch.Tensor = outputs.pow(2).mean()
    return result


def network(seed: int = 0, *middle: nn.Module) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(4, 8), *(middle or (nn.Tanh(), nn.Dropout(0.2))), nn.Linear(8, 3))


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Any, loss: Any = mean_square) -> list[float]:
    """Losses of plain PyTorch."""
    found = []
    for batch in batches:
        value = loss(model(*batch), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(value.detach()))
    return found


def batch_of(rows: int, seed: int = 0) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)),)


def test_every_batch_and_every_mask_is_new(quick: Fit) -> None:
    model, other = network(), network()
    batches = [batch_of(8, i) for i in range(4)]
    step = quick(model, batches[0], sgd, loss=mean_square)
    torch.manual_seed(3)
    found = [float(step(b)) for b in batches]
    torch.manual_seed(3)
    assert found == eager(other, sgd(other.parameters()), *batches)
    assert differences(model, other) == []
    assert len(set(found)) == 4


def test_two_models_in_one_process_do_not_meet(quick: Fit) -> None:
    models, others = [network(0), network(1, nn.ReLU())], [network(0), network(1, nn.ReLU())]
    batch = batch_of(8)
    steps = [quick(m, batch, sgd, loss=mean_square) for m in models]
    torch.manual_seed(0)
    found = [float(steps[i % 2](batch)) for i in range(6)]
    torch.manual_seed(0)
    optimizers = [sgd(o.parameters()) for o in others]
    expected = [eager(others[i % 2], optimizers[i % 2], batch)[0] for i in range(6)]
    assert found == expected
    assert all(differences(m, o) == [] for m, o in zip(models, others))


def test_evaluation_and_state_dict_see_trained_weights(quick: Fit) -> None:
    model, other = network(), network()
    batch = batch_of(8)
    step = quick(model, batch, sgd, loss=mean_square)
    torch.manual_seed(0)
    step(batch)
    torch.manual_seed(0)
    eager(other, sgd(other.parameters()), batch)
    assert same(model.state_dict(), other.state_dict())
    model.eval()
    other.eval()
    with torch.no_grad():
        assert torch.equal(model(*batch), other(*batch))
    copy = network()
    copy.load_state_dict(step.model.state_dict())
    assert differences(copy, model) == []


def test_modes_are_planned_and_not_mixed(quick: Fit) -> None:
    model, other = network(), network()
    batch = batch_of(8)
    step = quick(model, batch, sgd, loss=mean_square)
    optimizer = sgd(other.parameters())
    for training in (True, False, True):
        model.train(training)
        other.train(training)
        torch.manual_seed(1)
        found = float(step(batch))
        torch.manual_seed(1)
        assert [found] == eager(other, optimizer, batch)


def test_a_new_shape_is_planned_on_call_and_shares_the_optimizer(quick: Fit) -> None:
    model, other = network(), network()
    step = quick(model, batch_of(8), sgd, loss=mean_square)
    batches = [batch_of(rows, rows) for rows in (8, 5, 8, 5)]
    torch.manual_seed(2)
    plans, found = [], []
    for batch in batches:
        found.append(float(step(batch)))
        plans.append(step.plan.plan_hash)
    torch.manual_seed(2)
    optimizer = sgd(other.parameters())
    assert found == eager(other, optimizer, *batches)
    assert plans[0] == plans[2] != plans[1] == plans[3]
    assert same(step.optimizer.state_dict(), optimizer.state_dict())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, flip: bool = False) -> Any:
        return self.layer(x) * (-scale if flip else scale)


def test_a_changed_number_is_planned_and_not_silently_the_old_one(quick: Fit) -> None:
    with seeded(0):
        model, other = Scaled(), Scaled()
    other.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    batches = [{"x": x, "scale": s, "flip": f} for s, f in ((1.0, False), (3.0, False), (3.0, True), (1.0, False))]
    step = quick(model, batches[0], sgd, loss=lambda outputs, batch: outputs.sum() * batch["scale"])
    optimizer = sgd(other.parameters())
    for batch in batches:
        value = other(**batch).sum() * batch["scale"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(step(batch)) == float(value.detach())
    assert differences(model, other) == []


def test_frozen_later_is_planned_anew(quick: Fit) -> None:
    model, other = network(), network()
    batch = batch_of(8)
    step = quick(model, batch, sgd, loss=mean_square)
    optimizer = sgd(other.parameters())
    for frozen in (False, True, False):
        for m in (model, other):
            m.get_submodule("0").requires_grad_(not frozen)
        torch.manual_seed(1)
        found = float(step(batch))
        torch.manual_seed(1)
        assert [found] == eager(other, optimizer, batch)
    assert differences(model, other) == []


def test_without_an_optimizer_gradients_add_up(quick: Fit) -> None:
    model, other = network(0, nn.Tanh()), network(0, nn.Tanh())
    batches = [batch_of(8, 0), batch_of(8, 1)]
    step = quick(model, batches[0], loss=mean_square)
    for batch in batches:
        step(batch)
        mean_square(other(*batch), batch).backward()  # type: ignore[no-untyped-call]
        assert differences(model, other) == []
    assert step.optimizer is None


class _Square(torch.autograd.Function):
    """With a backward of its own, wrong on purpose: three times the slope."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 6 * x * gradients[0]


class WithFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _Square.apply(x)


@torch.library.custom_op("stowage_tests::swish", mutates_args=())
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@torch.library.custom_op("stowage_tests::swish_backward", mutates_args=())
def swish_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return gradient * (s + x * s * (1 - s))


swish.register_fake(lambda x: torch.empty_like(x))
swish_backward.register_fake(lambda gradient, x: torch.empty_like(x))
swish.register_autograd(
    lambda ctx, gradient: swish_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class WithOperator(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return swish(x)


@pytest.mark.parametrize("middle", [WithFunction, WithOperator])
def test_functions_and_operators_of_ones_own(quick: Fit, middle: Callable[[], nn.Module]) -> None:
    model, other = network(0, middle(), nn.Dropout(0.2)), network(0, middle(), nn.Dropout(0.2))
    batches = [batch_of(8, i) for i in range(3)]
    step = quick(model, batches[0], sgd, loss=mean_square)
    torch.manual_seed(0)
    found = [float(step(b)) for b in batches]
    torch.manual_seed(0)
    assert found == eager(other, sgd(other.parameters()), *batches)
    assert differences(model, other) == []
    operators = {c.target for c in step.planned.trace.calls}
    assert ("stowage_tests.swish.default" in operators) == (middle is WithOperator)


def test_planning_leaves_the_random_state_alone(quick: Fit) -> None:
    state = torch.get_rng_state()
    quick(network(3), batch_of(7), sgd, loss=mean_square)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_schedule_of_the_users(quick: Fit) -> None:
    model, other = network(), network()
    batch = batch_of(8)
    step = quick(model, batch, sgd, loss=mean_square)
    optimizer = sgd(other.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (step.optimizer, optimizer)]
    for _ in range(3):
        torch.manual_seed(0)
        step(batch)
        torch.manual_seed(0)
        eager(other, optimizer, batch)
        for schedule in schedules:
            schedule.step()
    assert differences(model, other) == []
    assert step.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_arguments_that_are_wrong_are_one_sentence(quick: Fit) -> None:
    for budget in ("12 parsecs", "-5MiB", 0):
        with pytest.raises(StowageError) as caught:
            quick(network(), batch_of(8), sgd, loss=mean_square, device_budget=budget)
        assert "\n" not in str(caught.value)
    with pytest.raises(ParameterError, match=r"^Sequential.forward\(input\) does not take this batch"):
        quick(network(), {"input": batch_of(8)[0], "what": object()}, sgd, loss=mean_square)

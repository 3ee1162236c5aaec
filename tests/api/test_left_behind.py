"""What forward and loss leave in the user's objects has real values after every step."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.beside_plain import WIDTH, Script, adamw, mlp, rows, square, trains_equally


class Logs(nn.Module):
    """A dictionary of tensors, a list that grows, a counter, a buffer that is replaced, a number in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: torch.Tensor
        self.calls = 0
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        self.logs = {"kl": y.pow(2).mean().detach(), "shape": tuple(y.shape)}
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls += 1
        self.history.append(y.detach().mean())
        self.best = (y.max().item(), "max")
        return y


def of_a_module() -> Script:
    """See `Logs`."""
    model = Logs()
    seen = lambda: [model.logs, model.calls, model.history, model.best]  # noqa: E731
    return Script(model, adamw(model), square, rows(), seen=seen)


def of_a_loss() -> Script:
    """Numbers read off tensors: appended, added up, copied, counted where something holds."""
    model, bag, total = mlp(), collections.defaultdict(list), {"count": 0, "mean": 0.0, "steps": 0}

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        value = outputs.pow(2).mean()
        bag["loss"].append(value.item())
        total["count"] += int((outputs > 0).sum())
        total["mean"] += float(outputs.detach().mean())
        total["copy"] = [total["count"]]
        if value > 0:
            bag["double"].append((value * 2).item())
            total["steps"] += 1
        return value

    return Script(model, adamw(model), loss, rows(), seen=lambda: [dict(bag), total])


@dataclass
class Meter:
    """As people write them."""

    last: Any = None
    total: float = 0.0
    window: Any = None

    def update(self, value: float) -> None:
        """Add one."""
        self.last = value
        self.total += value
        if self.window is None:
            self.window = collections.deque(maxlen=2)
        self.window.append(value)


def of_an_object() -> Script:
    """A meter that the loss updates."""
    model, meter = mlp(), Meter()

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        value = outputs.pow(2).mean()
        meter.update(value.item())
        return value

    return Script(model, adamw(model), loss, rows(), seen=lambda: [meter.last, meter.total, list(meter.window)])


class Recurrent(nn.Module):
    """What one step leaves the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x if self.state is None else x + self.state)
        self.state = y.detach()
        return y


def that_the_next_step_reads() -> Script:
    """See `Recurrent`."""
    model = Recurrent()
    return Script(model, adamw(model), square, rows(), seen=lambda: model.state)


def of_a_gradient_hook() -> Script:
    """Norms of gradients, kept by a hook."""
    model, norms = mlp(), []
    model[0].weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    return Script(model, adamw(model), square, rows(), seen=lambda: norms)


@pytest.mark.exactness
@pytest.mark.parametrize("make", [of_a_module, of_a_loss, of_an_object, that_the_next_step_reads, of_a_gradient_hook])
def test_real_values_after_every_step(make: Any) -> None:
    trains_equally(make, "90%")


def test_what_is_left_is_counted() -> None:
    step = trains_equally(that_the_next_step_reads, "95%")
    measured = step.measure(rows(1)[0])
    assert measured.peak_bytes <= step.plan.device_budget_bytes
    assert abs(measured.peak_bytes - step.plan.device_peak_bytes) <= 0.02 * step.plan.device_peak_bytes


def test_a_decision_that_is_another_one_is_said_and_traced_again() -> None:
    """Truth is not known while tracing: the first step says so, all others count."""
    said: list[str] = []
    model, counts = mlp(), {"bad": 0, "good": 0}

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        value = outputs.pow(2).mean()
        counts["bad" if torch.isnan(value) else "good"] += 1
        return value

    from stowage.flows import fit

    batches = rows()
    step = fit(model, batches[0], adamw(model), device_budget="90%", loss=loss, quick=True, say=said.append)
    for batch in batches:
        step(batch)
    assert counts == {"bad": 0, "good": 3}
    assert sum("depends on a tensor's value" in text for text in said) == 1

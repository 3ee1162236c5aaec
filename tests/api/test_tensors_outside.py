"""Tensors that belong neither to the model nor to the batch are read where they are, at every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.api.beside_plain import ROWS, WIDTH, Script, adamw, mlp, plainly, planned, rows, square, trains_equally


def a_head_in_the_loss() -> Script:
    """A classifier that the optimizer holds, and class weights in a closure."""
    model, head, weights = mlp(), nn.Linear(WIDTH, 4), torch.rand(4)
    labels = torch.randint(0, 4, (ROWS,))

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return F.cross_entropy(head(outputs), labels, weight=weights)

    def between(number: int) -> None:
        weights.mul_(0.9)
        labels.random_(0, 4)

    return Script(
        model, adamw(model, head), loss, rows(), between, lambda: [p.detach().clone() for p in head.parameters()]
    )


class ArcFace(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))
        self.labels = torch.randint(0, 4, (ROWS,))

    def forward(self, outputs: torch.Tensor, _: Any) -> torch.Tensor:
        cosine = F.linear(F.normalize(outputs), F.normalize(self.weight))
        return F.cross_entropy(8.0 * (cosine - 0.2 * F.one_hot(self.labels, 4)), self.labels)


def a_loss_that_is_a_module() -> Script:
    """ArcFace."""
    model, loss = mlp(), ArcFace()
    return Script(model, adamw(model, loss), loss, rows(), seen=lambda: loss.weight.detach().clone())


def a_teacher_that_follows() -> Script:
    """A mean teacher, updated in place between the steps."""
    model = mlp()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        return F.mse_loss(outputs, wanted + 0.1)

    def between(_: int) -> None:
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    seen = lambda: [p.clone() for p in teacher.parameters()]  # noqa: E731
    return Script(model, adamw(model), loss, rows(), between, seen)


def a_bank_in_a_dictionary() -> Script:
    """A memory bank that is another tensor after each step."""
    model, state = mlp(), {"bank": [torch.randn(16, WIDTH)]}

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return -torch.logsumexp(outputs @ state["bank"][0].t(), 1).mean()

    def between(_: int) -> None:
        state["bank"][0] = torch.cat([state["bank"][0][4:], torch.randn(4, WIDTH)])

    return Script(model, adamw(model), loss, rows(), between, lambda: state["bank"][0])


class KeepsATensor(nn.Module):
    """A tensor in a plain list, one in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.shifts = [torch.randn(WIDTH)]
        self.scale = torch.rand(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * self.scale) + self.shifts[0]


def tensors_of_a_module_that_are_no_buffers() -> Script:
    """In a list and in an attribute; both are replaced."""
    model = KeepsATensor()

    def between(number: int) -> None:
        model.shifts[0] = model.shifts[0] + 1.0
        model.scale = torch.full((WIDTH,), 1.0 + number)

    return Script(model, adamw(model), square, rows(), between)


def a_penalty_over_parameters() -> Script:
    """The loss reads the model's own parameters, held in a list."""
    model = mlp()
    weights = [p for p in model.parameters() if p.ndim > 1]
    start = [p.detach().clone() for p in weights]

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return outputs.pow(2).mean() + 0.1 * sum(((p - old) ** 2).sum() for p, old in zip(weights, start, strict=True))

    return Script(model, adamw(model), loss, rows())


@pytest.mark.parametrize(
    "make",
    [
        a_head_in_the_loss,
        a_loss_that_is_a_module,
        a_teacher_that_follows,
        a_bank_in_a_dictionary,
        tensors_of_a_module_that_are_no_buffers,
        a_penalty_over_parameters,
    ],
)
def test_read_where_they_are(make: Any) -> None:
    step = trains_equally(make)
    assert len(step.programs.known) == 1, "one plan serves all steps"


def test_what_no_optimizer_holds_gets_its_gradient() -> None:
    """A discriminator's gradient under the generator's loss, as `loss.backward()` leaves it, added up over steps."""

    def make() -> Script:
        model, judge = mlp(), mlp(dropout=0.0)
        seen = lambda: [p.grad.clone() for p in judge.parameters() if p.grad is not None]  # noqa: E731
        return Script(model, adamw(model), lambda out, _: judge(out).mean(), rows(3), seen=seen)

    mine, _ = planned(make, "90%")
    theirs = plainly(make)
    assert len(theirs["seen"]) == 6
    assert all(torch.equal(a, b) for a, b in zip(mine["seen"], theirs["seen"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mine["parameters"], theirs["parameters"], strict=True))


def test_what_is_outside_counts_in_the_budget() -> None:
    def make() -> Script:
        model = mlp()
        teacher = nn.Linear(WIDTH, 100 * WIDTH).requires_grad_(False)
        return Script(model, adamw(model), lambda out, x: (out.sum(1, keepdim=True) * teacher(x)).mean(), rows())

    _, step = planned(make, "97%")
    outside = [s for s in step.planned.trace.storages if s.role == "outside"]
    assert sum(s.nbytes for s in outside) == 4 * (WIDTH * 100 * WIDTH + 100 * WIDTH)
    measured = step.measure(rows(1)[0])
    assert measured.peak_bytes <= step.plan.device_budget_bytes
    assert abs(measured.peak_bytes - step.plan.device_peak_bytes) <= 0.02 * step.plan.device_peak_bytes


def test_another_form_is_another_plan() -> None:
    def make() -> Script:
        model, state = mlp(), {"bank": torch.randn(16, WIDTH)}

        def between(_: int) -> None:
            state["bank"] = torch.cat([state["bank"], torch.randn(4, WIDTH)])

        return Script(model, adamw(model), lambda out, _: (out @ state["bank"].t()).pow(2).mean(), rows(3), between)

    step = trains_equally(make)
    assert len(step.programs.known) == 3

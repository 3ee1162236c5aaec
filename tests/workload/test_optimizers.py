"""Optimizers and schedules by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.optimizers import optimizer_factory, scheduler_factory


def test_builds_what_it_names() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    made = optimizer_factory("adamw", {"lr": 0.01, "betas": [0.8, 0.9]})(parameters)
    assert type(made) is torch.optim.AdamW
    assert made.defaults["betas"] == (0.8, 0.9)
    schedule = scheduler_factory("CosineAnnealingLR", {"T_max": 4})(made)
    made.step()
    schedule.step()
    assert 0 < made.param_groups[0]["lr"] < 0.01


def test_transformers_schedules() -> None:
    made = optimizer_factory("SGD", {"lr": 1.0})([nn.Parameter(torch.zeros(3))])
    schedule = scheduler_factory("linear", {"num_warmup_steps": 2, "num_training_steps": 4})(made)
    rates = []
    for _ in range(4):
        rates.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    assert rates == [0.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("AdamV", {}, "did you mean Adam"),
        ("LBFGS", {}, "closure"),
        ("AdamW", {"lrr": 1}, r"arguments\.lrr is not an argument of AdamW; it takes .*lr"),
        ("AdamW", {"lr": -1.0}, "Invalid learning rate"),
        ("AdamW", {"params": []}, "params is not an argument"),
        ("SGD", {"lr": "fast"}, "cannot be built"),
    ],
)
def test_optimizer_errors(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        optimizer_factory(name, arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("CosineLR", {}, "unknown to torch"),
        ("ReduceLROnPlateau", {}, "validation metric"),
        ("LambdaLR", {}, "needs a function"),
        ("StepLR", {}, "step_size"),
        ("StepLR", {"steps": 3}, r"arguments\.steps is not an argument of StepLR"),
        ("cosine", {"num_warmup_steps": 1}, "num_training_steps"),
        ("cosine", {"warmup": 1}, "warmup is not an argument of cosine"),
    ],
)
def test_schedule_errors(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        scheduler_factory(name, arguments)

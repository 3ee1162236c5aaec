"""What a plan depends on of an optimizer."""

from __future__ import annotations

import time

import torch
from torch import nn

from stowage.stages.optimizers import signature_of


def many(count: int = 150) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_numbers_that_a_schedule_moves_are_not_part_of_it() -> None:
    optimizer = torch.optim.AdamW(many(), lr=1e-2)
    before = signature_of(optimizer)
    optimizer.param_groups[0].update(lr=0.0, betas=(0.8, 0.9), weight_decay=0.3, initial_lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert signature_of(optimizer) == before
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert signature_of(optimizer) != before
    optimizer.param_groups[0].update(weight_decay=0.1, amsgrad=True)
    assert signature_of(optimizer) != before


def test_differences_name_the_parameter() -> None:
    parameters = many(3)
    names = {id(p): f"weight{i}" for i, p in enumerate(parameters)}
    optimizer = torch.optim.SGD(parameters[:2], lr=1e-2)
    before = signature_of(optimizer)
    assert before.differences(signature_of(optimizer), names) == []
    optimizer.add_param_group({"params": [parameters[2]]})
    assert before.differences(signature_of(optimizer), names) == [
        "the optimizer has 2 groups; the step was planned with 1.",
        "weight2 is in group 1 of the optimizer; the step was planned with it in none.",
    ]
    optimizer.param_groups[0]["momentum"] = 0.5
    found = before.differences(signature_of(optimizer), names)
    assert "momentum of group 0 of the optimizer is another kind of value now." in found


def test_another_step_and_hooks_are_part_of_it() -> None:
    optimizer = torch.optim.SGD(many(3), lr=1e-2)
    before = signature_of(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert signature_of(optimizer) != before
    handle.remove()
    assert signature_of(optimizer) == before
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert signature_of(optimizer) != before


def test_it_is_fast() -> None:
    """The processor time of this thread, whatever else the machine does."""
    optimizer = torch.optim.AdamW(many(), lr=1e-2)
    times = []
    for _ in range(50):
        began = time.thread_time()
        signature_of(optimizer)
        times.append(time.thread_time() - began)
    assert min(times) < 2e-4

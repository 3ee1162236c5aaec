"""What the rules leave where it is, in tables that no job has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stowage.flows.planning.by_rules import Rules
from stowage.stages.trace import MicroBatch, trace_step


def rules_of(*, share: bool = False, max_grad_norm: float | None = None) -> Rules:
    """Of three matrices, of which two share memory if asked. The optimizer has one, so that two gradients stay."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    if share:
        flat = torch.randn(128)
        for index in (0, 1):
            model[index].weight.data = flat[64 * index : 64 * (index + 1)].view(8, 8)
    optimizer = torch.optim.AdamW([model[2].weight])
    batch, micro_batch = (torch.randn(4, 8),), MicroBatch(max_grad_norm=max_grad_norm)
    trace = trace_step(model, batch, loss=lambda out, _: out.sum(), optimizer=optimizer, micro_batch=micro_batch)
    return Rules(trace, movable_bytes=64)


@pytest.mark.parametrize("share", [False, True])
def test_parameters_that_share_memory_stay(share: bool) -> None:
    """One that leaves would give nothing back."""
    rules = rules_of(share=share)
    parameters = {s.storage for s in rules.trace.storages if s.role == "parameter"}
    assert len(parameters) == (2 if share else 3)
    moved = parameters.intersection(rules.stream_all().start.offloaded)
    assert len(moved) == (1 if share else 3)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_gradients_that_a_clip_scales_stay(max_grad_norm: float | None) -> None:
    """They are scaled at the end, and one that went down when it was complete is not there any more."""
    rules = rules_of(max_grad_norm=max_grad_norm)
    plan = rules.stream_all()
    rules.judge(plan)
    assert sum(s.role == "gradient" for s in plan.slots) == (2 if max_grad_norm is None else 0)

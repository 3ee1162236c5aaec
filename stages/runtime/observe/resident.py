"""Limits what the process may occupy while it trains, where its own memory is the device."""

from __future__ import annotations

import gc

import torch
from torch import nn

from stowage.stages.device import unique_bytes
from stowage.stages.device.heap import ResidentLimit, limit_for, trim
from stowage.stages.runtime.observe.measure import resident_tensors


def resident_limit(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, budget_bytes: int
) -> ResidentLimit | None:
    """Return a limit: what the process occupies now besides tensors, plus the budget for these; None on other devices.

    Memory that planning has freed is given back to the system first, or it would raise the limit.
    """
    if any(p.device.type != "cpu" for p in model.parameters()):
        return None
    gc.collect()
    trim()
    return limit_for(budget_bytes, unique_bytes(resident_tensors(model, optimizer, ())))

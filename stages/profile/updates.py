"""Measures or estimates the optimizer's updates: of one parameter, or of all in one step."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stowage.stages.device import Device
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import UPDATE_ALL, jointly_updated, updated_parameter
from stowage.stages.profile.measure import Alone, measured

MakeUpdate = Callable[[Call, TraceTables, str], Callable[[], None]]
"""Makes an update on made-up tensors, given an update call, its trace and a kind of device."""


def measure_update(call: Call, trace: TraceTables, device: Device, kind: str, make: MakeUpdate | None = None) -> Alone:
    """Measure an update of parameters of the call's form, states included.

    Args:
        call: an update of one parameter or of all.
        trace: the trace that the call is from.
        device: measures the update.
        kind: the device's type, for PyTorch.
        make: makes the update from the user's own optimizer; by default its class is made from the trace's settings.

    Raises:
        TableError: the class cannot be imported, or its settings were not plain numbers and strings.
    """
    work = make(call, trace, kind) if make is not None else _from_settings(call, trace, kind)
    return replace(measured(work, device), output_bytes=0)


def _from_settings(call: Call, trace: TraceTables, kind: str) -> Callable[[], None]:
    if call.target == UPDATE_ALL:
        raise TableError(
            "An update of all parameters in one step is measured on the optimizer itself, which only `fit` and `stow` "
            "have: plan there."
        )
    value = trace.values[call.reads[1]]
    dtype = getattr(torch, value.dtype)
    parameter = nn.Parameter(torch.rand(value.shape, device=kind).to(dtype))
    parameter.grad = torch.rand(value.shape, device=kind).to(dtype)
    _, rule = updated_parameter(call.arguments)
    module, _, name = rule.optimizer.partition(":")
    try:
        kind_of_optimizer: Any = getattr(importlib.import_module(module), name)
        optimizer = kind_of_optimizer([{"params": [parameter], **json.loads(rule.settings)}])
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise TableError(
            f"The optimizer {rule.optimizer} cannot be made from the trace's settings: {error}."
        ) from error
    scale = torch.ones((), device=kind)

    def update() -> None:
        if len(call.reads) > 2 and parameter.grad is not None:  # the gradients are clipped
            torch._foreach_mul_([parameter.grad], scale)
        optimizer.step()

    return update


def estimate_update(call: Call, trace: TraceTables, description: DeviceDescription) -> Cost:
    """Estimate an update: it reads parameter, gradient and states and writes parameter and states.

    The workspace is two temporaries, of all parameters where they are updated in one step.
    """
    values = jointly_updated(call.arguments).values() if call.target == UPDATE_ALL else (call.reads[1],)
    size = sum(_bytes(value, trace) for value in values)
    traffic = 3 * size + 2 * sum(trace.storages[s].nbytes for s in call.mutates if trace.storages[s].role == "state")
    return Cost(
        signature=call.signature,
        device=description.fingerprint,
        time_s=traffic / description.update_bytes_per_s + description.dispatch_s,
        output_bytes=0,
        workspace_bytes=2 * size,
        samples=0,
        source="roofline",
    )


def _bytes(value: int, trace: TraceTables) -> int:
    row = trace.values[value]
    dtype: torch.dtype = getattr(torch, row.dtype)
    return math.prod(row.shape) * dtype.itemsize

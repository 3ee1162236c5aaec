"""Estimates a call that cannot be measured here: the slower of its arithmetic and its traffic, plus dispatch."""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.kernels import SUBSTITUTES
from stowage.stages.profile.arguments import make_arguments, operator_of


def _bytes(value: int, trace: TraceTables) -> int:
    row = trace.values[value]
    dtype: torch.dtype = getattr(torch, row.dtype)
    return math.prod(row.shape) * dtype.itemsize


def estimate_call(call: Call, trace: TraceTables, description: DeviceDescription) -> Cost:
    """Estimate a call from its flops and its bytes.

    Flops come from PyTorch's own formulas on fake tensors; bytes are those of every input and output once. A view costs
    its dispatch alone.
    """
    touched = () if call.is_view else {*call.reads, *(v for v in call.returns if v >= 0)}
    traffic = sum(_bytes(v, trace) for v in touched)
    created = {trace.values[v].storage for v in call.returns if v >= 0} - {trace.values[v].storage for v in call.reads}
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        args, kwargs = make_arguments(call, trace, torch.device("cpu"))
        operator = operator_of(call.target)
        SUBSTITUTES.get(operator, operator)(*args, **kwargs)
    flops = 0 if call.is_view else counter.get_total_flops()
    seconds = max(flops / description.flops_per_s, traffic / description.memory_copy_bytes_per_s)
    return Cost(
        signature=call.signature,
        device=description.fingerprint,
        time_s=seconds + description.dispatch_s,
        output_bytes=sum(trace.storages[s].nbytes for s in created),
        workspace_bytes=0,
        samples=0,
        source="roofline",
    )

"""Measures or estimates the cost of clipping's scale: a few operations on one number for each gradient."""

from __future__ import annotations

import torch

from stowage.stages.device import device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import Call, TraceTables

OPERATIONS = 5
"""Operations of clipping: stack, norm, addition, division, clamp."""

SAMPLES = 10
"""Timed executions, enough for any effort."""

NUMBER_BYTES = 64
"""Bytes counted for each temporary: enough for one number in any allocator."""


def measure_clip(call: Call, trace: TraceTables, target: DeviceDescription) -> Cost:
    """Time what `runtime.clip_scale` does, on made-up norms."""
    norms = [torch.rand((), device=target.type) for _ in call.reads]

    def work() -> torch.Tensor:
        total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        return torch.clamp(1.0 / (total + 1e-6), max=1.0)

    work()
    device = device_of(target.type)
    elapsed = min(device.time_s(work) for _ in range(SAMPLES))
    cost = _output(call, trace), _workspace(call), SAMPLES
    return Cost(call.signature, target.fingerprint, elapsed, *cost, "measured")


def estimate_clip(call: Call, trace: TraceTables, target: DeviceDescription) -> Cost:
    """Estimate clipping as a few dispatches."""
    elapsed = OPERATIONS * target.dispatch_s
    return Cost(call.signature, target.fingerprint, elapsed, _output(call, trace), _workspace(call), 0, "roofline")


def _output(call: Call, trace: TraceTables) -> int:
    return sum(trace.storages[trace.values[v].storage].nbytes for v in call.returns)


def _workspace(call: Call) -> int:
    return 8 * len(call.reads) + OPERATIONS * NUMBER_BYTES

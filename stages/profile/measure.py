"""Measure one call: mean time, bytes of its results, workspace."""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stowage.stages.device import Device
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import updated_parameter
from stowage.stages.profile.arguments import kernel_of, make_arguments

VIEW_TOUCHES_BYTES = 1 << 14
"""A view reads no elements, but what it needs of the interpreter and PyTorch is not warm either."""


def preemptions() -> int:
    """How often another process took a core from this one so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def undisturbed(clean: list[float], disturbed: list[float], least: int) -> list[float]:
    """The samples that count: those during which nobody took a core away, which say nothing of a neighbour; where
    they are fewer than `least`, the faster half of all."""
    if len(clean) >= least:
        return clean
    everything = sorted(clean + disturbed)
    return everything[: max(least, len(everything) // 2)]


def _samples(device: Device, work: Callable[[], Any], touched_bytes: int, seconds: float, least: int) -> list[float]:
    """Times of `work`, after one run to warm up, each with caches as a step leaves them (`Device.evict`).

    Their mean is what a call adds to a step: what makes some of them slow does so there too. At least `least` samples,
    and more until `seconds` have passed or a hundred are taken; for `undisturbed` ones it may take twice as long.
    """
    device.time_s(work)
    clean: list[float] = []
    disturbed: list[float] = []
    start = time.perf_counter()
    while True:
        device.evict(touched_bytes)
        before = preemptions()
        sample = device.time_s(work)
        (disturbed if preemptions() > before else clean).append(sample)
        taken, passed = len(clean) + len(disturbed), time.perf_counter() - start
        enough = len(clean) >= least
        if taken >= least and (passed >= (seconds if enough else 2 * seconds) or len(clean) >= 100):
            return undisturbed(clean, disturbed, least)


def measure_call(call: Call, trace: TraceTables, device: Device, kind: str, *, seconds: float, least: int) -> Cost:
    """Run `call` on made-up tensors.

    Raises:
        TableError: the operator does not run on this device.
    """
    kernel = kernel_of(call)

    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return kernel(*args, **kwargs)

    operator = with_gradients if call.target in OPAQUE else kernel

    target = torch.device(kind)
    error: Exception | None = None
    for integers in (2, 1):
        args, kwargs = make_arguments(call, trace, target, integers=integers)
        try:
            if target.type != "cpu":
                operator(*args, **kwargs)  # libraries take workspaces at the first call, and keep them
            memory = device.measure(lambda: operator(*args, **kwargs))  # noqa: B023 - runs at once
            break
        except Exception as problem:  # an index of 1 into a dimension of 1: try zeros
            error = problem
    else:
        raise TableError(f"The call {call.target} of the trace does not run on this device: {error}.")
    touched = {trace.values[v].storage for v in (*call.reads, *call.returns) if v >= 0}
    touched_bytes = VIEW_TOUCHES_BYTES if call.is_view else sum(trace.storages[s].nbytes for s in touched)
    times = _samples(device, lambda: operator(*args, **kwargs), touched_bytes, seconds, least)
    return Cost(
        signature=call.signature,
        device=device.fingerprint(),
        time_s=statistics.fmean(times),
        output_bytes=memory.end_bytes,
        workspace_bytes=max(0, memory.peak_bytes - max(memory.end_bytes, 0)),
        samples=len(times),
        source="measured",
    )


def measure_update(
    call: Call,
    trace: TraceTables,
    device: Device,
    kind: str,
    *,
    seconds: float,
    least: int,
) -> Cost:
    """Update one parameter of the call's shape with the optimizer's own class, states included.

    Raises:
        TableError: the class cannot be imported, or its settings were not plain numbers and strings.
    """
    value = trace.values[call.reads[1]]
    dtype = getattr(torch, value.dtype)
    parameter = nn.Parameter(torch.rand(value.shape, device=kind).to(dtype))
    parameter.grad = torch.rand(value.shape, device=kind).to(dtype)
    _, rule = updated_parameter(call.arguments)
    module, _, name = rule.optimizer.partition(":")
    try:
        kind_of_optimizer = getattr(importlib.import_module(module), name)
        optimizer = kind_of_optimizer([{"params": [parameter], **json.loads(rule.settings)}])
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise TableError(
            f"The optimizer {rule.optimizer} cannot be made from the trace's settings: {error}."
        ) from error
    scale = torch.ones((), device=kind)

    def update() -> None:
        if len(call.reads) > 2 and parameter.grad is not None:  # clipped
            torch._foreach_mul_([parameter.grad], scale)
        optimizer.step()

    first = device.measure(update)
    steady = device.measure(update)
    touched_bytes = 2 * parameter.nbytes + sum(t.nbytes for t in _tensors(optimizer))
    times = _samples(device, update, touched_bytes, seconds, least)
    workspace = max(first.peak_bytes - max(first.end_bytes, 0), steady.peak_bytes - max(steady.end_bytes, 0), 0)
    return Cost(call.signature, device.fingerprint(), statistics.fmean(times), 0, workspace, len(times), "measured")


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The states."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]

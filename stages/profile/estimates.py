"""Costs of a trace's calls without timing any: from the store, from other sizes, and what memory they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from stowage.stages.device import device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE
from stowage.stages.profile.clip import estimate_clip
from stowage.stages.profile.measure import measure_call, measure_update
from stowage.stages.profile.roofline import estimate_call, estimate_update
from stowage.stages.profile.similar import Similar, made_bytes
from stowage.stages.profile.store import CostStore


def estimated_costs(
    traces: Iterable[TraceTables], target: DeviceDescription, store: CostStore, similar: Similar
) -> dict[str, Cost]:
    """One cost for each distinct call, by signature. Workspace is never less than the call needs: where no call of its
    kind that was measured is as large, it runs twice on made-up tensors.

    Args:
        traces: of steps or forwards.
        target: this machine's device.
        store: of measured costs; nothing is added to it.
        similar: knows calls of other sizes, and learns what is measured here.

    Raises:
        TableError: an operator does not run on this device.
    """
    found = {s: c for s, c in store.read(target.fingerprint).items() if c.source == "measured"}
    for trace in traces:
        for call in trace.calls:
            if call.signature not in found:
                found[call.signature] = _estimated(call, trace, target, similar)
        similar.learn(trace, found)
    return found


def _estimated(call: Call, trace: TraceTables, target: DeviceDescription, similar: Similar) -> Cost:
    if call.target == CLIP:
        return replace(estimate_clip(call, trace, target), source="similar")
    made, workspace_bytes = made_bytes(call, trace), 0 if call.is_view else similar.workspace_bytes(call, trace)
    if workspace_bytes is None:
        made, workspace_bytes = _memory(call, trace, target)
    time_s = target.dispatch_s if call.is_view else similar.time_s(call, trace)
    if time_s is None:
        time_s = (estimate_update if call.target == UPDATE else estimate_call)(call, trace, target).time_s
    return Cost(call.signature, target.fingerprint, time_s, made, workspace_bytes, 0, "similar")


def _memory(call: Call, trace: TraceTables, target: DeviceDescription) -> tuple[int, int]:
    """Bytes of results and workspace, measured."""
    device = device_of(target.type)
    with torch.random.fork_rng(devices=["cuda"] if target.type == "cuda" else []):
        if call.target == UPDATE:
            alone = measure_update(call, trace, device, target.type)
        else:
            with torch.no_grad():
                alone = measure_call(call, trace, device, target.type)
    return alone.output_bytes, alone.workspace_bytes

"""Costs of a trace's calls without timing any: from the store, from other sizes, and what memory they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from stowage.stages.device import device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE, UPDATE_ALL
from stowage.stages.profile.clip import estimate_clip
from stowage.stages.profile.measure import MadeUpError, measure_call
from stowage.stages.profile.roofline import estimate_call
from stowage.stages.profile.similar import Similar, made_bytes
from stowage.stages.profile.store import CostStore
from stowage.stages.profile.updates import MakeUpdate, estimate_update, measure_update

_UPDATES = (UPDATE, UPDATE_ALL)


def estimated_costs(
    traces: Iterable[TraceTables],
    target: DeviceDescription,
    store: CostStore,
    similar: Similar,
    make_update: MakeUpdate | None = None,
) -> dict[str, Cost]:
    """One cost for each distinct call, by signature. Workspace is never less than the call needs: where no call of its
    kind that was measured is as large, it runs twice on made-up tensors.

    Args:
        traces: of steps or forwards.
        target: this machine's device.
        store: of measured costs; nothing is added to it.
        similar: knows calls of other sizes, and learns what is measured here.
        make_update: see `measure_update`.

    Raises:
        TableError: an operator does not run on this device.
    """
    found = {s: c for s, c in store.read(target.fingerprint).items() if c.source == "measured"}
    for trace in traces:
        for call in trace.calls:
            if call.signature not in found:
                found[call.signature] = _estimated(call, trace, target, similar, make_update)
        similar.learn(trace, found)
    return found


def _estimated(
    call: Call, trace: TraceTables, target: DeviceDescription, similar: Similar, make_update: MakeUpdate | None
) -> Cost:
    if call.target == CLIP:
        return replace(estimate_clip(call, trace, target), source="similar")
    made, workspace_bytes = made_bytes(call, trace), 0 if call.is_view else similar.workspace_bytes(call, trace)
    if workspace_bytes is None:
        made, workspace_bytes = _memory(call, trace, target, make_update)
    time_s = target.dispatch_s if call.is_view else similar.time_s(call, trace)
    if time_s is None:
        time_s = (estimate_update if call.target in _UPDATES else estimate_call)(call, trace, target).time_s
    return Cost(call.signature, target.fingerprint, time_s, made, workspace_bytes, 0, "similar")


def _memory(
    call: Call, trace: TraceTables, target: DeviceDescription, make_update: MakeUpdate | None
) -> tuple[int, int]:
    """Bytes of results and workspace, measured."""
    device = device_of(target.type)
    with torch.random.fork_rng(devices=["cuda"] if target.type == "cuda" else []):
        if call.target in _UPDATES:
            alone = measure_update(call, trace, device, target.type, make_update)
        else:
            try:
                with torch.no_grad():
                    alone = measure_call(call, trace, device, target.type)
            except MadeUpError as error:
                raise TableError(f"What {call.target} takes in memory is not known: {error}.") from error
    return alone.output_bytes, alone.workspace_bytes

"""Estimates costs of a trace's calls without timing any: from the store, from other sizes, and from their memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from stowage.stages.device import device_of
from stowage.stages.ir.collectives import COLLECTIVES
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.quiet import quiet_torch
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE, UPDATE_ALL
from stowage.stages.kernels import Outputs
from stowage.stages.optimizers.quiet import quiet
from stowage.stages.profile.clip import estimate_clip
from stowage.stages.profile.collectives import collective_cost
from stowage.stages.profile.comparison import Comparison
from stowage.stages.profile.measure import Alone, MadeUpError, measure_call
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
    """Return one cost for each distinct call, by signature.

    Workspace is never less than the call needs: where no measured call of its kind is as large, it runs on made-up
    tensors, and what it returns is compared with the trace.

    Args:
        traces: traces of steps or forwards.
        target: this machine's device.
        store: measured costs; nothing is added to it.
        similar: knows calls of other sizes, and learns what is measured here.
        make_update: makes updates of the user's own optimizer, see `measure_update`.

    Raises:
        TableError: an operator does not run on this device.
        FakeKernelError: calls return something else than the traces say: they must be traced again.
    """
    traces = list(traces)
    distinct = {call.signature: (trace, call) for trace in traces for call in reversed(trace.calls)}
    kernels = {s: (trace, call) for s, (trace, call) in distinct.items() if call.target not in COLLECTIVES}
    comparison = Comparison(kernels, store, target)
    comparison.check(run=False, later=())
    found = {s: c for s, c in store.read(target.fingerprint).items() if c.source == "measured"}
    found |= {s: collective_cost(c, trace, target) for s, (trace, c) in distinct.items() if c.target in COLLECTIVES}
    returned: dict[str, Outputs] = {}
    for signature, (trace, call) in distinct.items():
        if signature in found:
            continue
        workspace = (0, ()) if call.is_view else similar.workspace_bytes(call, trace)
        if call.target == CLIP:
            found[signature] = replace(estimate_clip(call, trace, target), source="similar")
        elif workspace is not None:
            found[signature] = _estimated(call, trace, target, similar, made_bytes(call, trace), *workspace)
        else:
            alone = _alone(call, trace, target, make_update)
            if alone is None:  # the same mode as where calls are measured in full
                found[signature] = replace(estimate_call(call, trace, target), source="similar")
                continue
            if alone.outputs is not None:
                returned[signature] = alone.outputs
            memory = alone.output_bytes, alone.workspace_bytes, alone.flagged_bytes
            found[signature] = _estimated(call, trace, target, similar, *memory)
    comparison.add(returned)
    for trace in traces:
        similar.learn(trace, found)
    return found


def times_are_known(trace: TraceTables, target: DeviceDescription, store: CostStore, similar: Similar) -> bool:
    """Return whether every call of the trace, or one of its kind, was timed."""
    measured = store.read(target.fingerprint)
    return all(
        call.is_view
        or (call.signature in measured and measured[call.signature].is_measured())
        or similar.time_s(call, trace) is not None
        for call in trace.calls
    )


def _estimated(
    call: Call,
    trace: TraceTables,
    target: DeviceDescription,
    similar: Similar,
    output_bytes: int,
    workspace_bytes: int,
    flagged_bytes: tuple[int, ...],
) -> Cost:
    time_s = target.dispatch_s if call.is_view else similar.time_s(call, trace)
    if time_s is None:
        time_s = (estimate_update if call.target in _UPDATES else estimate_call)(call, trace, target).time_s
    memory = output_bytes, workspace_bytes
    return Cost(call.signature, target.fingerprint, time_s, *memory, 0, "similar", flagged_bytes)


def _alone(call: Call, trace: TraceTables, target: DeviceDescription, make_update: MakeUpdate | None) -> Alone | None:
    """Measure the call's memory and its outputs; return None where it takes none of the made-up contents."""
    device = device_of(target.type)
    with quiet_torch(), quiet():
        if call.target in _UPDATES:
            return measure_update(call, trace, device, target.type, make_update)
        try:
            with torch.no_grad():
                return measure_call(call, trace, device, target.type)
        except MadeUpError:
            return None

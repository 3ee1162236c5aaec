"""Cost of every distinct call of a trace on a device, from the store where it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from stowage.stages.device import device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE
from stowage.stages.profile.clip import estimate_clip, measure_clip
from stowage.stages.profile.measure import measure_call, measure_update
from stowage.stages.profile.roofline import estimate_call, estimate_update
from stowage.stages.profile.rounds import ROUNDS, in_rounds
from stowage.stages.profile.store import CostStore

__all__ = ["CostStore", "profile_trace", "profile_variants"]


def profile_variants(
    traces: Iterable[TraceTables], target: DeviceDescription, store: CostStore, **how: Any
) -> list[Cost]:
    """Costs of every distinct call of several traces; see `profile_trace`."""
    found: dict[str, Cost] = {}
    for trace in traces:
        found.update({c.signature: c for c in profile_trace(trace, target, store, **how)})
    return [found[signature] for signature in sorted(found)]


def profile_trace(
    trace: TraceTables,
    target: DeviceDescription,
    store: CostStore,
    *,
    costs: Literal["measured", "roofline"] = "measured",
    seconds_per_call: float = 0.3,
    min_samples: int = 6,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cost]:
    """One cost for each distinct call of `trace`, sorted by signature.

    Args:
        trace: the trace.
        target: the device that will train.
        store: where costs are looked up and added.
        costs: `roofline` estimates what the store does not know, without running anything.
        seconds_per_call, min_samples: effort per call; in each of several rounds two samples at least are taken.
        progress: called with the number of calls done and the total, before each look at one.

    Raises:
        PlanMismatchError: costs must be measured, but this machine is not the target.
    """
    distinct: dict[str, Call] = {}
    for call in trace.calls:
        distinct.setdefault(call.signature, call)
    known = store.read(target.fingerprint)
    usable = {s: c for s, c in known.items() if costs == "roofline" or c.source == "measured"}
    missing = [call for signature, call in sorted(distinct.items()) if signature not in usable]
    device = device_of(target.type)
    if costs == "measured" and missing and device.fingerprint() != target.fingerprint:
        raise PlanMismatchError(
            f"{len(missing)} operations have no measured cost for {target.name}, and this machine is another device: "
            "run the profile stage there, or make this machine the target (`python -m stowage.stages.device`)."
        )
    rounds = max(1, min(ROUNDS, min_samples // 2)) if costs == "measured" else 1

    def look(call: Call) -> Cost:
        seconds, least = seconds_per_call / rounds, -(-min_samples // rounds)
        if call.target == CLIP:
            return (estimate_clip if costs == "roofline" else measure_clip)(call, trace, target, device)
        if costs == "roofline":
            return (estimate_update if call.target == UPDATE else estimate_call)(call, trace, target)
        if call.target == UPDATE:
            return measure_update(call, trace, device, target.type, seconds=seconds, least=least)
        with torch.no_grad():
            return measure_call(call, trace, device, target.type, seconds=seconds, least=least)

    generators = ["cuda"] if target.type == "cuda" and costs == "measured" and missing else []
    with torch.random.fork_rng(devices=generators):
        for fresh in in_rounds(missing, look, rounds, progress):
            store.add(target.fingerprint, fresh)
    progress(len(missing), len(missing))
    usable = store.read(target.fingerprint)
    return [usable[signature] for signature in sorted(distinct)]

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
from stowage.stages.profile.store import CostStore

__all__ = ["CostStore", "profile_trace", "profile_variants"]

SAVE_EVERY = 16


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
    min_samples: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cost]:
    """One cost for each distinct call of `trace`, sorted by signature.

    Args:
        trace: the trace.
        target: the device that will train.
        store: where costs are looked up and added.
        costs: `roofline` estimates what the store does not know, without running anything.
        seconds_per_call, min_samples: effort per call.
        progress: called with the number of calls done and the total.

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
    fresh: list[Cost] = []
    generators = ["cuda"] if target.type == "cuda" and costs == "measured" and missing else []
    with torch.random.fork_rng(devices=generators):
        for done, call in enumerate(missing):
            progress(done, len(missing))
            update = call.target == UPDATE
            if call.target == CLIP:
                measure = estimate_clip if costs == "roofline" else measure_clip
                fresh.append(measure(call, trace, target, device))
            elif costs == "roofline":
                fresh.append((estimate_update if update else estimate_call)(call, trace, target))
            elif update:
                fresh.append(
                    measure_update(call, trace, device, target.type, seconds=seconds_per_call, least=min_samples)
                )
            else:
                with torch.no_grad():
                    fresh.append(
                        measure_call(call, trace, device, target.type, seconds=seconds_per_call, least=min_samples)
                    )
            if len(fresh) % SAVE_EVERY == 0:
                store.add(target.fingerprint, fresh)
    if fresh:
        store.add(target.fingerprint, fresh)
    progress(len(missing), len(missing))
    usable = store.read(target.fingerprint)
    return [usable[signature] for signature in sorted(distinct)]

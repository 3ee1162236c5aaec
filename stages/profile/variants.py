"""Finds the cost of every distinct call of a trace on a device, from the store where it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from stowage.stages.device import is_here
from stowage.stages.ir.collectives import COLLECTIVES
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.quiet import quiet_torch
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE, UPDATE_ALL
from stowage.stages.kernels import Outputs
from stowage.stages.optimizers.quiet import quiet
from stowage.stages.profile.clip import estimate_clip, measure_clip
from stowage.stages.profile.collectives import collective_cost
from stowage.stages.profile.comparison import Comparison
from stowage.stages.profile.roofline import estimate_call
from stowage.stages.profile.store import CostStore, Keeper
from stowage.stages.profile.timing import Patience, measure_together
from stowage.stages.profile.updates import MakeUpdate, estimate_update


def profile_trace(trace: TraceTables, target: DeviceDescription, store: CostStore, **how: Any) -> list[Cost]:
    """Return costs of every distinct call of one trace; see `profile_variants`."""
    return profile_variants([trace], target, store, **how)


def profile_variants(
    traces: Iterable[TraceTables],
    target: DeviceDescription,
    store: CostStore,
    *,
    costs: Literal["measured", "roofline"] = "measured",
    seconds_per_call: float = 0.3,
    min_samples: int = 6,
    make_update: MakeUpdate | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    notice: Callable[[str], None] = lambda text: None,
) -> list[Cost]:
    """Return one cost for each distinct call of several traces, sorted by signature.

    A call that has been measured enough is stored while others are still being measured.

    Args:
        traces: traces of steps.
        target: the device that will train.
        store: where costs are looked up and added; measurements of fewer samples than asked for here are made anew.
        costs: `roofline` estimates what the store does not know, without running anything.
        seconds_per_call: time spent on measuring, for each distinct call.
        min_samples: timed executions of each call, at least.
        make_update: makes updates of the user's own optimizer, to be measured; see `measure_update`.
        progress: called with the number of calls done and the total, now and then.
        notice: called with what the user should know, one sentence each.

    Raises:
        PlanMismatchError: costs must be measured, but this machine is not the target.
        TableError: an operator does not run on this device.
        FakeKernelError: calls return something else than the traces say: they must be traced again.
    """
    traces = list(traces)
    together = {c.signature: (trace, c) for trace in traces for c in trace.calls if c.target in COLLECTIVES}
    known = store.read(target.fingerprint)
    here = costs == "measured" and is_here(target)
    enough = min_samples if here else 1  # on another device, the stored costs must do
    usable = {s for s, c in known.items() if costs == "roofline" or c.is_measured(enough)}
    distinct: dict[str, tuple[TraceTables, Call]] = {}
    missing: list[tuple[TraceTables, list[Call]]] = []
    for trace in traces:
        calls_to_cost = (call for call in reversed(trace.calls) if call.target not in COLLECTIVES)
        fresh = {call.signature: call for call in calls_to_cost if call.signature not in distinct}
        distinct.update((signature, (trace, call)) for signature, call in fresh.items())
        missing.append((trace, [call for signature, call in fresh.items() if signature not in usable]))
    count = sum(len(calls) for _, calls in missing)
    if costs == "measured" and count and not here:
        raise PlanMismatchError(
            f"{count} operations have no measured cost for {target.name}, and this machine is another device: "
            "run the profile stage there, or make this machine the target (`python -m stowage.stages.device`)."
        )
    comparison = Comparison(distinct, store, target)
    comparison.check(run=here, later=[c.signature for _, calls in missing for c in calls])
    if count and costs == "roofline":
        store.add(target.fingerprint, [_estimate(call, trace, target) for trace, calls in missing for call in calls])
    elif count:
        with quiet_torch(), quiet():
            keeper = Keeper(store, target.fingerprint, min_samples)
            patience = Patience(seconds_per_call, min_samples)
            found = _measure(
                missing,
                target,
                patience,
                lambda part: progress(int(part * count), count),
                comparison.add,
                make_update,
                keeper.keep,
            )
            keeper.keep(found)
        measured = {c.signature for c in found}
        others = [(trace, c) for trace, calls in missing for c in calls if c.signature not in measured]
        store.add(target.fingerprint, [_estimate_unmeasured(call, trace, target) for trace, call in others])
        if others:
            names = ", ".join(sorted({call.target for _, call in others}))
            notice(
                f"The times of {len(others)} operations are estimated, since the made-up numbers they were tried with "
                f"are outside of their domain: {names}."
            )
    progress(count, count)
    costed = store.read(target.fingerprint)
    collectives = {s: collective_cost(call, trace, target) for s, (trace, call) in together.items()}
    return [(collectives.get(s) or costed[s]) for s in sorted({*distinct, *collectives})]


def _estimate(call: Call, trace: TraceTables, target: DeviceDescription) -> Cost:
    if call.target == CLIP:
        return estimate_clip(call, trace, target)
    return (estimate_update if call.target in (UPDATE, UPDATE_ALL) else estimate_call)(call, trace, target)


def _estimate_unmeasured(call: Call, trace: TraceTables, target: DeviceDescription) -> Cost:
    """Estimate a call that raises at whatever is made up for it.

    Raises:
        TableError: it is the call that is wrong, not what was made up.
    """
    try:
        return _estimate(call, trace, target)
    except Exception as error:  # a fake kernel may raise anything
        raise TableError(f"The call {call.target} of the trace does not run on this device: {error}.") from None


def _measure(
    missing: Iterable[tuple[TraceTables, list[Call]]],
    target: DeviceDescription,
    patience: Patience,
    progress: Callable[[float], None],
    returned: Callable[[Mapping[str, Outputs]], None],
    make_update: MakeUpdate | None,
    keep: Callable[[list[Cost]], None],
) -> list[Cost]:
    clips = [measure_clip(call, trace, target) for trace, calls in missing for call in calls if call.target == CLIP]
    others = [(trace, [call for call in calls if call.target != CLIP]) for trace, calls in missing]
    keep(clips)
    return [*clips, *measure_together(others, target, patience, progress, returned, make_update, keep)]

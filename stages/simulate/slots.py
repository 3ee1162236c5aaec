"""Makes the places in the lower tier of what a plan offloads."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.machine import Placement, TierState
from stowage.stages.ir.plan import Slot, Start
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables, base_values
from stowage.stages.ir.updates import gradient_slot, left_behind


def slots_of(trace: TraceTables, steps: Sequence[Step], state: TierState) -> list[Slot]:
    """Return a slot for every storage that the plan transfers, in the order of their first transfer."""
    base = base_values(trace)
    moved = dict.fromkeys([s.storage for s in steps if ACTIONS[s.kind].transfers] + sorted(state.offloaded))
    behind = left_behind(trace)
    stays = {trace.values[g.gradient_value].storage: g.parameter for g in trace.gradients if g.gradient_value in behind}
    last = {s.storage: s.kind for s in steps if s.storage in stays}
    found: list[Slot] = []
    for storage in moved:
        s = trace.storages[storage]
        name, role = s.name, s.role
        if role == "gradient":
            name = gradient_slot(s.name)
        elif role == "temporary":
            name = trace.values[base[storage]].name
            if last.get(storage) == "free":  # it waits in `.grad`, offloaded
                name, role = gradient_slot(stays[storage]), "gradient"
        placement: Placement = "disk" if storage in state.on_disk else "host"
        found.append(Slot(storage, name, s.nbytes, role, _start(storage, state), storage in state.copied, placement))
    return found


def _start(storage: int, state: TierState) -> Start:
    if storage in state.reloading:
        return "reloading"
    if storage in state.offloading:
        return "offloading"
    if storage in state.updating:
        return "updating"
    return "offloaded" if storage in state.offloaded else "device"

"""Replays a trace in plain PyTorch's order, and finds what each group of parameters takes of its time and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.partition.group_members import ROOT, Groups


@dataclass
class Part:
    """What one group's calls take: seconds, and bytes."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_peak: int = 0
    backward_peak: int = 0
    with_gradients: int = 0
    gradients: int = 0
    saved: int = 0
    first_saved: int = 0
    incoming: int = 0
    crossing: int = 0


def parts_of_groups(trace: TraceTables, costs: Mapping[str, Cost], groups: Groups) -> dict[str, Part]:
    """Replay plain PyTorch's order: what is in memory while each group runs, beside what others have saved."""
    parts: dict[str, Part] = defaultdict(Part)
    life = _Lives(trace, groups)
    live = waiting = 0
    begun: set[str] = set()
    saved: dict[str, int] = defaultdict(int)
    saved_by_all = 0
    for call in trace.calls:
        if call.phase == "update":
            continue
        cost = costs.get(call.signature)
        if cost is None:
            raise TableError(f"Call {call.call} ({call.target}) has no cost: profile the trace again.")
        path = groups.of_call[call.call]
        part = parts[path]
        if call.phase == "backward" and path not in begun:
            begun.add(path)
            part.incoming = live - saved_by_all + waiting if path != ROOT else 0
        for storage in life.born[call.call]:
            size = trace.storages[storage].nbytes
            live += size
            if storage in life.saved:
                saved[path] += size
                saved_by_all += size
                part.saved += size
                part.first_saved += size if path == ROOT and len(parts) == 1 else 0
            if storage in life.crossing:
                part.crossing += size
        here = live - (saved_by_all - saved[path]) + cost.workspace_bytes + (waiting if path != ROOT else 0)
        if call.phase == "forward":
            part.forward_s += cost.time_s
            part.forward_peak = max(part.forward_peak, here)
        else:
            part.backward_s += cost.time_s
            part.backward_peak = max(part.backward_peak, here)
            part.gradients += life.gradients.get(call.call, 0)
            part.with_gradients = max(part.with_gradients, here + part.gradients)
        waiting += life.waiting.get(call.call, 0)
        for storage in life.dying[call.call]:
            size = trace.storages[storage].nbytes
            live -= size
            if storage in life.saved:
                saved[life.maker[storage]] -= size
                saved_by_all -= size
    return parts


class _Lives:
    """From when to when each temporary storage is in memory; gradients of parameters are not among them.

    Attributes:
        born: call -> storages that it makes.
        dying: call -> storages that it is the last to use.
        saved: storages that forward keeps for backward.
        crossing: storages of forward that another group reads: what a checkpointed segment keeps.
        maker: storage -> path of the group that made it.
        gradients: call -> bytes of gradients of parameters that it makes.
        waiting: call -> bytes of gradients of the model's own group that it completes; they wait for the end of
            backward, while those of other groups are reduced when their part of backward ends.
    """

    def __init__(self, trace: TraceTables, groups: Groups) -> None:
        storage_of = [v.storage for v in trace.values]
        gradients = {storage_of[g.gradient_value] for g in trace.gradients if g.gradient_value >= 0}
        temporary = {s.storage for s in trace.storages if s.role == "temporary"} - gradients
        own = {storage_of[g.gradient_value] for g in trace.gradients if g.parameter in groups.members[ROOT]} & gradients
        self.gradients: dict[int, int] = defaultdict(int)
        self.waiting: dict[int, int] = defaultdict(int)
        to_come = set(gradients)
        for call in trace.calls:
            for storage in {storage_of[v] for v in call.returns if v >= 0} & to_come:
                self.gradients[call.call] += trace.storages[storage].nbytes
                self.waiting[call.call] += trace.storages[storage].nbytes if storage in own else 0
                to_come.discard(storage)
        made: dict[int, Call] = {}
        last: dict[int, Call] = {}
        self.crossing: set[int] = set()
        for call in trace.calls:
            if call.phase == "update":
                continue
            used = {storage_of[v] for v in (*call.reads, *(v for v in call.returns if v >= 0))} & temporary
            for storage in used:
                first = made.setdefault(storage, call)
                last[storage] = call
                if call.phase == "forward" and groups.of_call[first.call] != groups.of_call[call.call]:
                    self.crossing.add(storage)
        self.maker = {s: groups.of_call[call.call] for s, call in made.items()}
        self.saved = {s for s, call in made.items() if call.phase == "forward" and last[s].phase == "backward"}
        self.born: dict[int, list[int]] = defaultdict(list)
        self.dying: dict[int, list[int]] = defaultdict(list)
        for storage, call in made.items():
            self.born[call.call].append(storage)
            self.dying[last[storage].call].append(storage)

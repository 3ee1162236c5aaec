"""Says from when to when each temporary storage of a traced step is in memory, and whose group it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile

from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.partition.group_members import ROOT, Groups


class Lives:
    """From when to when each temporary storage is in memory; gradients of parameters are not among them.

    What a backward function of PyTorch reads and makes is there until it returns.

    Attributes:
        born: call -> storages that it makes.
        dying: call -> storages that it is the last to use.
        saved: storages that forward keeps for backward.
        crossing: storages of forward that another group reads: what a checkpointed segment keeps.
        maker: storage -> path of the group that made it.
        gradients: call -> bytes of gradients of parameters of other groups than the model's own that it makes.
        waiting: call -> bytes of gradients of the model's own group that it makes; they wait for the end of backward,
            while those of other groups are reduced when their part of backward ends.
        views: calls that compute nothing; whose backward they belong to is not always known.
        arriving: call -> group whose weights may be gathered right before it, for backward: what the group has returned
            has its gradient by then, and nothing inside the group has run.
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
                (self.waiting if storage in own else self.gradients)[call.call] += trace.storages[storage].nbytes
                to_come.discard(storage)
        made: dict[int, Call] = {}
        last: dict[int, Call] = {}
        users: dict[int, set[str]] = defaultdict(set)
        self.crossing: set[int] = set()
        for call in trace.calls:
            if call.phase == "update":
                continue
            used = {storage_of[v] for v in (*call.reads, *(v for v in call.returns if v >= 0))} & temporary
            for storage in used:
                first = made.setdefault(storage, call)
                last[storage] = call
                users[storage].add(call.module)
                if call.phase == "forward" and groups.of_call[first.call] != groups.of_call[call.call]:
                    self.crossing.add(storage)
        frames = _Frames(trace, groups)
        returns = {call.function: call for call in trace.calls if call.phase == "backward" and call.function >= 0}
        for storage, call in made.items():
            if last[storage].phase == "forward":
                last[storage] = frames.holding(call, last[storage], users[storage])
            else:
                last[storage] = returns.get(last[storage].function, last[storage])
        self.maker = {s: groups.of_call[call.call] for s, call in made.items()}
        self.saved = {s for s, call in made.items() if call.phase == "forward" and last[s].phase == "backward"}
        self.born: dict[int, list[int]] = defaultdict(list)
        self.dying: dict[int, list[int]] = defaultdict(list)
        for storage, call in made.items():
            self.born[call.call].append(storage)
            self.dying[last[storage].call].append(storage)
        self.views = {call.call for call in trace.calls if call.is_view}
        self.arriving = self._arrivals(trace, groups, storage_of)

    def _arrivals(self, trace: TraceTables, groups: Groups, storage_of: list[int]) -> dict[int, str]:
        """Find the calls between the last that belongs to what follows a group in forward and the first inside it.

        A group's part begins with the backward of what follows it, such as a last norm, which reads what others have
        saved. Inside is what reads the group's weights, makes their gradients, or reads what it alone has saved.
        """
        weights = defaultdict(set)
        for value in trace.values:
            role, _, name = value.source.partition(":")
            if role == "parameter":
                weights[name].add(value.storage)
        completed = {g.parameter: storage_of[g.gradient_value] for g in trace.gradients if g.gradient_value >= 0}
        own = {path: set().union(*(weights[n] for n in names)) for path, names in groups.members.items()}
        made = {path: {completed[n] for n in names if n in completed} for path, names in groups.members.items()}
        found: dict[str, list[int]] = defaultdict(list)
        inside: set[str] = set()
        for call in trace.calls:
            path = groups.of_call[call.call]
            if call.phase != "backward" or path == ROOT or path in inside or call.call in self.views:
                continue
            read = {storage_of[v] for v in call.reads}
            saved = {self.maker[s] for s in read & self.saved if s not in self.crossing}
            if read & own[path] or path in saved or {storage_of[v] for v in call.returns if v >= 0} & made[path]:
                inside.add(path)
                found[path].append(call.call)
            elif saved:
                found[path] = []
            else:
                found[path].append(call.call)
        return {call: path for path, calls in found.items() for call in calls}


class _Frames:
    """Says until when Python refers to what nothing reads any more.

    What one module hands to another is a variable of the module around both, which lives until that returns; what the
    model itself makes behind all groups, such as shifted labels, lives until it returns. A variable that is given
    another value before counts too long.
    """

    def __init__(self, trace: TraceTables, groups: Groups) -> None:
        self._calls = [call for call in trace.calls if call.phase == "forward"]
        self._place = {call.call: place for place, call in enumerate(self._calls)}
        self._group_of = groups.of_call
        inside = [place for place, call in enumerate(self._calls) if groups.of_call[call.call] != ROOT]
        self._behind = max(inside, default=len(self._calls))

    def holding(self, made: Call, last: Call, users: Iterable[str]) -> Call:
        """Return the call of forward with which a storage dies.

        Args:
            made: the call that makes it.
            last: the last that reads it, in forward too.
            users: paths of the modules whose calls make or read it.
        """
        if self._place[made.call] > self._behind:
            return self._calls[-1]
        paths = {tuple(path.split(".")) for path in users}
        group = self._group_of[made.call]
        if group == ROOT or len(paths) == 1:
            return last
        around = ".".join(_shared(paths))
        if not _is_in(around, group):
            return last
        place = self._place[last.call]
        while place + 1 < len(self._calls) and _is_in(self._calls[place + 1].module, around):
            place += 1
        return self._calls[place]


def _shared(paths: Iterable[tuple[str, ...]]) -> list[str]:
    """Return what paths have in common at their beginning."""
    return [steps[0] for steps in takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))]


def _is_in(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")

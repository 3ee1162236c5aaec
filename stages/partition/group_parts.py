"""Replays a trace in plain PyTorch's order, and finds what each group of parameters takes of its time and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.partition.group_lives import Lives
from stowage.stages.partition.group_members import ROOT, Groups


@dataclass
class Part:
    """What one group's calls take: seconds, and bytes.

    Attributes:
        forward_s, backward_s: time of the calls.
        saved: what they save in forward.
        between: what the model itself saves between this group's forward and the next group's.
        first_saved: of the model's own group, what it saves before all others.
        crossing: what the calls make in forward that another group reads.
        entering: what there is when its forward begins.
        incoming, leaving: what there is when its weights are gathered for backward, and when its backward has ended.
        forward_peak, backward_peak: the most in its forward, and in its backward without gradients of its weights.
        with_gradients: the most in its backward with gradients of its weights.
        end_peak: of the model's own group, the most after the backward of all others, with its own gradients.

    What there is counts gradients of the model's own group, and leaves out what is saved for groups that come earlier
    in forward; but `end_peak` is all there is. `entering`, `incoming` and `leaving` leave out the group's own too.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    saved: int = 0
    between: int = 0
    first_saved: int = 0
    crossing: int = 0
    entering: int = 0
    incoming: int = 0
    leaving: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    with_gradients: int = 0
    end_peak: int = 0


def parts_of_groups(trace: TraceTables, costs: Mapping[str, Cost], groups: Groups) -> dict[str, Part]:
    """Replay plain PyTorch's order: what is in memory while each group runs, beside what others have saved.

    Raises:
        TableError: a call of the trace has no cost.
    """
    lives = Lives(trace, groups)
    replay = _Replay(trace, groups, lives)
    calls = [call for call in trace.calls if call.phase != "update"]
    ends = max((c.call for c in calls if c.phase == "backward" and groups.of_call[c.call] != ROOT), default=len(calls))
    for call in calls:
        cost = costs.get(call.signature)
        if cost is None:
            raise TableError(f"Call {call.call} ({call.target}) has no cost: profile the trace again.")
        if call.phase == "forward":
            replay.forward(call, cost)
        elif call.call <= ends:
            replay.backward(call, cost)
        else:
            replay.last(call, cost)
    replay.end()
    return replay.parts


def _saved(trace: TraceTables, groups: Groups, lives: Lives) -> dict[str, Part]:
    """Add up what each group saves; what the model itself saves between two of them is with the former."""
    parts: dict[str, Part] = defaultdict(Part)
    used, last = ROOT, groups.order[-1]
    for call in trace.calls:
        path = groups.of_call[call.call]
        if call.phase == "forward" and path != ROOT:
            used = path
        for storage in lives.born[call.call]:
            size = trace.storages[storage].nbytes
            if storage in lives.crossing:
                parts[path].crossing += size
            if storage not in lives.saved:
                continue
            if path == ROOT and used not in (ROOT, last):
                parts[used].between += size
            else:
                parts[path].saved += size
                parts[path].first_saved += size if used == ROOT != last else 0
    return parts


class _Replay:
    """Runs one call after the other, and notes for each group what is in memory at the moments that bind."""

    def __init__(self, trace: TraceTables, groups: Groups, lives: Lives) -> None:
        self.parts = _saved(trace, groups, lives)
        self._trace, self._groups, self._lives = trace, groups, lives
        self._order = groups.order[1:]
        self._now = 0
        """Bytes of temporary storages, and of gradients of the model's own group."""
        self._gradients = 0
        """Bytes of gradients of the group whose backward runs."""
        self._used = self._turn = ROOT
        """The group that forward has used last, and the one whose backward runs."""
        self._entered: set[str] = set()
        self._arrived: set[str] = set()
        self._earlier: dict[str, int] = {}
        """Bytes that are saved for groups that come earlier in forward."""
        total = first = self.parts[ROOT].first_saved
        for path in self._order:
            self._earlier[path] = total
            total += self._saved_by(path)
        self._earlier[ROOT] = total - first

    def _saved_by(self, path: str) -> int:
        return self.parts[path].saved + self.parts[path].between

    def forward(self, call: Call, cost: Cost) -> None:
        """Compute a call of forward; one of the model itself counts with the group before it, or with the first."""
        path = self._groups.of_call[call.call]
        self.parts[path].forward_s += cost.time_s
        if path != ROOT:
            self._used = path
            if path not in self._entered:
                self._entered.add(path)
                self.parts[path].entering = self._now - self._earlier[path]
        elif self._order and self._used != self._order[-1]:
            path = self._used or self._order[0]
        part = self.parts[path]
        part.forward_peak = max(part.forward_peak, self._most_in(call, cost) - self._earlier[path])
        self._free(call)

    def backward(self, call: Call, cost: Cost) -> None:
        """Compute a call of backward; one of the model itself counts with the group whose backward runs."""
        path = self._groups.of_call[call.call]
        self.parts[path].backward_s += cost.time_s
        if path not in (ROOT, self._turn) and call.call not in self._lives.views:
            self._begin_turn(path)
        self._arrive(call)
        path = path or self._turn
        part = self.parts[path]
        most = self._most_in(call, cost) - self._earlier[path]
        self._gradients += self._lives.gradients.get(call.call, 0)
        part.backward_peak = max(part.backward_peak, most)
        part.with_gradients = max(part.with_gradients, most + self._gradients)
        self._free(call)

    def last(self, call: Call, cost: Cost) -> None:
        """Compute a call of the model itself after the backward of all groups."""
        part = self.parts[ROOT]
        part.backward_s += cost.time_s
        self.end()
        part.end_peak = max(part.end_peak, self._most_in(call, cost))
        self._free(call)

    def end(self) -> None:
        """End the backward of all groups."""
        if self._turn != ROOT:
            self._end_turn(0)
            self._turn = ROOT

    def _begin_turn(self, path: str) -> None:
        self._end_turn(self._order.index(path) + 1)
        self._turn, self._gradients = path, 0
        self.parts[path].incoming = self._now - self._earlier[path] - self._saved_by(path)

    def _end_turn(self, place: int) -> None:
        """Note what there is for the group whose turn it was, and for those down to a place, which have no turn."""
        if self._turn != ROOT:
            self.parts[self._turn].leaving = self._now - self._earlier[self._turn]
        for path in self._order[place : self._order.index(self._turn) if self._turn != ROOT else None]:
            self.parts[path].leaving = self._now - self._earlier[path]
            self.parts[path].incoming = self.parts[path].leaving - self._saved_by(path)

    def _arrive(self, call: Call) -> None:
        path = self._lives.arriving.get(call.call)
        if path is None:
            return
        there, part = self._now - self._earlier[path] - self._saved_by(path), self.parts[path]
        part.incoming = max(part.incoming, there) if path in self._arrived else there
        self._arrived.add(path)

    def _most_in(self, call: Call, cost: Cost) -> int:
        """Add what a call makes, and return the most that there is while it is computed."""
        self._now += sum(self._trace.storages[s].nbytes for s in self._lives.born[call.call])
        self._now += self._lives.waiting.get(call.call, 0)
        return self._now + cost.workspace_bytes

    def _free(self, call: Call) -> None:
        self._now -= sum(self._trace.storages[s].nbytes for s in self._lives.dying[call.call])

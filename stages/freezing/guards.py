"""Says which rows of a plan run under a mask, and where a tensor's last reader that runs may be an earlier one.

What forward computes for the loss is always computed, and so is what has an effect or draws random numbers there.
Anything else is computed if something that reads its results is; what that ends in is the update of a parameter, or a
gradient that stays in `.grad`, which has the guard of its parameter's unit. So whatever backward does before the first
unit that trains is skipped without being looked for. What is made again has the guard of those that read it then; a
transfer has that of what reads its storage afterwards.

A tensor that several rows read, under different guards, dies behind the last of them that runs. So behind each row that
may be the last there is a release: the tensor is dropped there unless something that reads it later runs.

A collective that runs beside computing has two rows, its start and a wait, under one guard. It uses what it reads and
makes until the wait, so nothing of that is dropped before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stowage.stages.freezing.outputs import StandIn, copied_guards, stand_ins
from stowage.stages.freezing.owners import Owners
from stowage.stages.freezing.stretches import persistent_guards, started_by
from stowage.stages.ir.actions import ACTIONS, STARTS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, implies, joined


@dataclass
class Guards:
    """The guards of a plan's rows, as sets of units (see `ir.units`); dictionaries are by the row's position.

    Attributes:
        rows: the guard of each row.
        outputs: the guard of each temporary storage that a row makes: of what reads it later.
        after: the guard under which storages that a row makes or reads are in memory behind it.
        releases: what is dropped behind a row unless something of a guard trains, besides what the plan frees.
        lacking: storages that a row reads where they are there, with their guards: the norms of gradients.
        wholes: storages that a row copies over codes only if something of their guards trains, with these.
        stand_ins: arguments of which only the form may be needed, each with the guard under which it is there.
        forgets: the guard of the later runs of a random node, where they may all be skipped though this run is not.
        later_runs: the guard of the later runs of a random node.
    """

    rows: list[int]
    outputs: dict[int, dict[int, int]] = field(default_factory=dict)
    after: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    releases: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    lacking: dict[int, dict[int, int]] = field(default_factory=dict)
    wholes: dict[int, dict[int, int]] = field(default_factory=dict)
    stand_ins: dict[int, list[StandIn]] = field(default_factory=dict)
    forgets: dict[int, int] = field(default_factory=dict)
    later_runs: dict[int, int] = field(default_factory=dict)


def guards_of(trace: TraceTables, nodes: Sequence[ComputeNode], steps: Sequence[Step], units: Sequence[Unit]) -> Guards:
    """Return the guards of a plan's rows."""
    return _Backwards(trace, nodes, steps, units).found


class _Backwards:
    """Goes through the rows from the last to the first.

    Attributes:
        found: the guards so far.
    """

    def __init__(
        self, trace: TraceTables, nodes: Sequence[ComputeNode], steps: Sequence[Step], units: Sequence[Unit]
    ) -> None:
        self._trace, self._nodes, self._steps = trace, nodes, steps
        self._owners = Owners(trace, nodes, units)
        self._copied = copied_guards(trace, units)
        self.found = Guards([ALWAYS] * len(steps))
        self._need = defaultdict[int, int](int, self._owners.kept)
        """Of each temporary storage, the guard of what reads its copy on the device later."""
        self._low = defaultdict[int, int](int, self._owners.kept)
        """Of each temporary storage, the guard of what reads its copy in the lower tier later."""
        self._freed: dict[int, int] = {}
        """Rows that free a storage whose last reader is not found yet."""
        self._later_runs: dict[int, int] = {}
        first: dict[int, int] = {}
        for number, step in enumerate(steps):
            if ACTIONS[step.kind].on_node:
                first.setdefault(step.node, number)
        self._first = frozenset(first.values())
        starts = started_by(steps)
        self._collected: dict[int, dict[int, int]] = {}
        """Of each collective under way, by the row that starts it, the guards of what reads its results."""
        for number in range(len(steps) - 1, -1, -1):
            step = steps[number]
            if step.kind in STARTS:
                self._start(number, step)
            elif number in starts and steps[starts[number]].kind in STARTS:
                self._end(number, starts[number])
            elif ACTIONS[step.kind].on_node:
                self._compute(number, step)
            elif self._owners.passing(step.storage):
                self._move(number, step)
        for wait, start in starts.items():
            self.found.rows[wait] = self.found.rows[start]
        moved = {s.storage for s in steps if ACTIONS[s.kind].transfers and not self._owners.passing(s.storage)}
        self.found.rows[:] = persistent_guards(nodes, steps, self.found.rows, moved, starts)

    def _compute(self, number: int, step: Step) -> None:
        node, found = self._nodes[step.node], self.found
        later = {s: self._need.pop(s, 0) for s in node.creates}
        wholes = {self._copied[c].source: self._copied[c].guard for c in node.calls if c in self._copied}
        guard = joined(self._guard(number, node, later), *wholes.values())
        found.rows[number] = guard
        found.outputs[number] = later
        for storage in node.creates:
            self._low.pop(storage, None)
            self._touch(number, storage, guard, later[storage])
            self._need.pop(storage)
        if step.kind == "update":
            for storage in filter(self._owners.passing, node.reads):
                self._low[storage] = joined(self._low[storage], guard)
            return
        lacking = self._owners.lacking(node)
        if any(own != guard for own in lacking.values()):
            found.lacking[number] = dict(lacking)
        own = dict(lacking)
        if wholes := {s: own for s, own in wholes.items() if not implies(guard, own) and self._reads_once(node, s)}:
            found.wholes[number] = wholes
            own |= wholes
        for one in stand_ins(self._trace, node, later, guard):
            there = joined(one.guard, self._need[one.storage])
            if not implies(guard, there):  # else what reads it later keeps it anyway
                own[one.storage] = one.guard
                found.stand_ins.setdefault(number, []).append(replace(one, guard=there))
        for storage in dict.fromkeys((*node.reads, *node.mutates)):
            if self._owners.passing(storage) and storage not in later:
                self._touch(number, storage, own.get(storage, guard), self._need[storage])
        if node.random:
            runs = found.later_runs[number] = self._later_runs.get(step.node, 0)
            if runs and not implies(guard, runs):
                found.forgets[number] = runs
            self._later_runs[step.node] = joined(runs, guard)

    def _reads_once(self, node: ComputeNode, storage: int) -> bool:
        reads = (self._trace.values[v].storage for c in node.calls for v in self._trace.calls[c].reads)
        return self._owners.passing(storage) and sum(s == storage for s in reads) == 1

    def _guard(self, number: int, node: ComputeNode, later: Mapping[int, int]) -> int:
        """Return the guard of a row that computes a node, from those of what reads its results."""
        first, read = number in self._first, joined(*later.values())
        if first and node.phase == "forward" and (not read or node.mutates or node.once or node.random):
            return ALWAYS
        return joined(self._owners.guard(node) if first else 0, read)

    def _end(self, number: int, start: int) -> None:
        """Take in the row that waits for the collective which the row `start` starts."""
        node = self._nodes[self._steps[start].node]
        later = self._collected[start] = {s: self._need.pop(s, 0) for s in node.creates}
        guard = self.found.rows[start] = self._guard(start, node, later)
        for storage in node.creates:
            self._low.pop(storage, None)
            self._touch(number, storage, guard, later[storage])
        for storage in filter(self._owners.passing, node.reads):
            self._touch(number, storage, guard, self._need[storage])

    def _start(self, number: int, step: Step) -> None:
        """Take in the row that starts a collective, whose end is known."""
        node, guard = self._nodes[step.node], self.found.rows[number]
        self.found.outputs[number] = self._collected.pop(number)
        for storage in node.creates:
            self.found.after[number][storage] = self._need.pop(storage)
        for storage in filter(self._owners.passing, node.reads):
            self._touch(number, storage, guard, self._need[storage])

    def _touch(self, number: int, storage: int, guard: int, later: int) -> None:
        """Note a row that makes or reads a copy on the device."""
        if storage in self._freed:
            self.found.rows[self._freed.pop(storage)] = guard
            self.found.after[number][storage] = guard
        else:
            self.found.after[number][storage] = later
            if not implies(guard, later):
                self.found.releases[number][storage] = later
        self._need[storage] = joined(guard, later)

    def _move(self, number: int, step: Step) -> None:
        """Take in a row that frees or transfers a temporary storage or a gradient that waits."""
        storage = step.storage
        if step.kind == "free":
            self._freed[storage] = number
            self._need[storage] = 0
        elif step.kind == "reload":
            guard = self._need.pop(storage, 0)
            self.found.rows[number] = guard
            self._low[storage] = joined(self._low[storage], guard)
            self._touch(number, storage, guard, guard)
            self._need.pop(storage)
        elif step.kind == "offload":
            guard = self._low[storage]
            self.found.rows[number] = guard
            self._touch(number, storage, guard, self._need[storage])

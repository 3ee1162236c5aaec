"""Adds to the cut formulation what may leave the device: one program of recomputation, copies and updates.

Everything that the cut formulation says of runs and of memory holds. A value may also leave memory after it was copied
below, and come back; what lasts from step to step, such as a parameter, need not be on the device at a cut; an update
may run on the CPU. The program has the time of the cuts as variables, so that what may have passed over a link by a cut
is limited by the link's rate. Its objective is the period: steps follow each other without end, and each step's rows
are those of the one before.

| symbol | here | meaning | unit |
|---|---|---|---|
| p | `lasting` | a storage that outlives the step | – |
| x | – | a value s, or a storage p | – |
| u | `cpu` | an update that the CPU may do | – |
| there[p, j] | `there` | p is on the device at T_j; T_0 is the border between two steps | 0/1 |
| start[s] | `start` | a gradient that waits is on the device when the step starts | 0/1 |
| up[x, i] | `up` | x was not on the device at T_i, and is reloaded before anything in interval i makes it | 0/1 |
| reloads[p] | `reloads` | times that p is reloaded in the step | – |
| sent[s, j] | `sent` | the part of s that has been copied below by T_j; T_(N+1) is the end | 0 to 1 |
| down[p] | `down` | p is copied below in the step | 0/1 |
| gone[p, j] | `gone` | p is not on the device at T_j, and the device changes it in the step | 0/1 |
| needed[p] | `needed_by_update` | what u alone reads comes up for it | 0/1 |
| cpu[u] | `cpu` | the CPU runs u | 0/1 |
| t[j] | `clock` | T_j, from the start of the step; t[N + 1] is the period | s |
| rate↓, rate↑, rate↕ | `link` | of each direction alone, and of both together | byte/s |

A reload counts as memory from the moment it is issued, and an offloaded value until its copy is complete and it has
been freed: that is the referee's rule. So what is not in memory at T_j is wholly below by then, or still to come.

What is left out only makes the bound smaller: room in the lower tier, a disk behind the host, buffers and padding,
queues (a link has its rate from the start to the end), waits of an update for its gradient, and storages of less than
`COUNTED` of the budget, which take no memory here and no time to copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.model import BYTES, CutModel, Key
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.formulations.cuts.transfers.below import Below
from stowage.stages.formulations.cuts.transfers.equations import EQUATIONS
from stowage.stages.solver.equations import add_equations
from stowage.stages.solver.milp import pulp

COUNTED = 1e-5
"""Share of the budget below which a storage that lasts is taken to need nothing."""


@dataclass
class TransferModel(CutModel):
    """Holds data, variables and the program.

    Attributes:
        below: the lower tier.
        there, start, up, reloads, sent, down, gone_if, cpu, clock: variables; only those that do not follow from the
            graph.
        needed_by_update: for what an update that the CPU may do reads alone: its variable, and the first and the last
            interval in which the update may run.
    """

    below: Below = field(kw_only=True)
    there: Mapping[Key, Any] = field(init=False)
    start: Mapping[int, Any] = field(init=False)
    up: Mapping[Key, Any] = field(init=False)
    sent: Mapping[Key, Any] = field(init=False)
    reloads: Mapping[int, Any] = field(init=False)
    down: Mapping[int, Any] = field(init=False)
    gone_if: Mapping[Key, Any] = field(init=False)
    needed_by_update: Mapping[int, tuple[Any, Key]] = field(init=False)
    cpu: Mapping[int, Any] = field(init=False)
    clock: Sequence[Any] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        last = len(self.cuts)
        touched = {(p, j) for j, g in enumerate(self.cuts, start=1) for p in self.below.touches[g]}
        everywhere = {(p, j) for p in self.lasting for j in self.intervals}
        self.there = self._variables("there", everywhere - touched)
        self.start = self._named("start", self.step.waiting)
        returning = self.domain.free_keeps | {(s, 0) for s in self.step.waiting}
        self.up = self._variables("up", returning | {(p, i) for p, i in everywhere - touched})
        leaving = {s for s, _ in returning} | self.step.stays
        leaving |= {s for u in self.below.cpu_update_s for s in self.step.reads[u]}
        self.sent = {
            (s, j): pulp.LpVariable(f"sent_{s}_{j}", 0, 1)
            for s in sorted(leaving - self.step.waiting)
            for j in range(self.domain.first[self.step.maker[s]][0] + 1, last + 2)
        }
        read = self.certain_reads
        self.reloads = {
            p: pulp.LpVariable(f"reloads_{p}", 0)
            for p in sorted(self.lasting & self.below.weights)
            if p in read and not self.below.cpu_update_s.keys().isdisjoint(self.changers[p])
        }
        self.down = self._named("down", {p for p in self.lasting if self.changers[p]})
        by_cpu = {p for p in self.down if self.below.cpu_update_s.keys() >= set(self.changers[p])}
        self.gone_if = self._variables("gone", {(p, j) for p, j in self.there if p in by_cpu})
        self.needed_by_update = {
            p: (pulp.LpVariable(f"needed_{p}", 0, 1), self.domain.first[self.changers[p][0]])
            for p in sorted(by_cpu - read.keys())
            if len(self.changers[p]) == 1
        }
        self.cpu = self._named("cpu", self.below.cpu_update_s)
        self.clock = [0, *(pulp.LpVariable(f"clock_{j}", 0) for j in range(1, last + 2))]

    def _named(self, name: str, keys: Any) -> Mapping[int, Any]:
        kind = pulp.LpBinary if self.integral else pulp.LpContinuous
        return {key: pulp.LpVariable(f"{name}_{key}", 0, 1, kind) for key in sorted(keys)}

    @cached_property
    def lasting(self) -> frozenset[int]:
        """Return the storages p that count."""
        return frozenset(p for p in self.below.lasting if self.step.nbytes[p] >= COUNTED * self.budget_bytes)

    @cached_property
    def changers(self) -> Mapping[int, list[int]]:
        """Return the nodes that change each p."""
        found: dict[int, list[int]] = {p: [] for p in self.lasting}
        for node, changed in enumerate(self.below.changes):
            for p in self.lasting.intersection(changed):
                found[p].append(node)
        return found

    def certain_changers(self, storage: int) -> list[int]:
        """Return the nodes of which one changes p on the device if it is gone: those that the CPU cannot do, or all."""
        changers = self.changers[storage]
        return [n for n in changers if n not in self.below.cpu_update_s] or changers

    def gone(self, storage: int, cut: int) -> Any:
        """Return gone[p, j]; the end of the step is the start of the next."""
        cut = cut if cut <= len(self.cuts) else 0
        return self.gone_if.get((storage, cut), 1 - self.is_there(storage, cut))

    @cached_property
    def sizes(self) -> Mapping[int, float]:
        """Return the bytes of each x in the program's unit of memory."""
        found = {x for x, _ in (*self.up, *self.sent)} | self.lasting
        return {x: self.moved(self.step.nbytes[x]) for x in sorted(found)}

    @cached_property
    def needed(self) -> frozenset[Key]:
        """Return (p, interval) in which something that runs there for certain touches p."""
        return frozenset(
            (p, i) for n, i in self.domain.sure_runs for p in self.lasting.intersection(self.below.touches[n])
        )

    @cached_property
    def certain_reads(self) -> Mapping[int, list[Key]]:
        """Return for each x the first and the last interval in which each of its readers runs once for certain."""
        found: dict[int, set[Key]] = {}
        for node, span in enumerate(self.domain.first):
            if node not in self.below.cpu_update_s:
                for x in (*self.step.reads[node], *self.lasting.intersection(self.below.touches[node])):
                    found.setdefault(x, set()).add(span)
        return {x: sorted(spans) for x, spans in found.items()}

    @cached_property
    def once_s(self) -> float:
        """Return the time of every node once, without the updates that the CPU may do."""
        return self.below.once_s(self.step)

    @cached_property
    def byte_unit(self) -> float:
        """Return the bytes of the program's unit of memory."""
        return max(self.budget_bytes, 1) / BYTES

    def keeps(self, value: int, cut: int) -> Any:
        """Return kept[s, j]; at the start what waits may be below."""
        return self.start.get(value, 0) if not cut else super().keeps(value, cut)

    def makes(self, value: int, interval: int) -> Any:
        """Return run[maker(s), i] + up[s, i]: both bring a value into memory."""
        return super().makes(value, interval) + self.up.get((value, interval), 0)

    def runs_since(self, node: int, cut: int) -> Any:
        """Return since[n, j]; an update that the CPU may do runs in no interval for certain."""
        if node in self.below.cpu_update_s and self.domain.first[node][0] >= cut:
            return pulp.lpSum(self.runs(node, i) for i in self.intervals if i >= cut)
        return super().runs_since(node, cut)

    def is_there(self, storage: int, cut: int) -> Any:
        """Return there[p, j]: 1 where g_j touches p; the end of the step is the start of the next."""
        return self.there.get((storage, cut if cut <= len(self.cuts) else 0), 1)

    def moved(self, nbytes: int) -> float:
        """Return bytes in the program's unit of memory."""
        return nbytes / self.byte_unit

    def rate(self, bytes_per_s: float) -> float:
        """Return a rate in the program's units."""
        return bytes_per_s * self.time_unit_s / self.byte_unit


def build_with_transfers(
    step: StepGraph, cuts: Sequence[int], budget_bytes: int, below: Below, *, integral: bool = False
) -> TransferModel:
    """Build the whole model; its objective is the period in units of `time_unit_s`.

    Args:
        step: the graph of the step.
        cuts: g_1 to g_N, none of them an update that the CPU may do.
        budget_bytes: the device's budget.
        below: the lower tier.
        integral: make an integer program, not its linear relaxation.
    """
    domain = Domain.of(step, cuts, optional=frozenset(below.cpu_update_s), leaves=True)
    model = TransferModel(step, cuts, budget_bytes, domain, {}, integral, below=below)
    model.problem += model.clock[-1] + 0 * model.sure, "time"
    add_equations(model.problem, EQUATIONS, model)
    return model

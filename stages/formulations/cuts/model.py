"""Cuts a whole step at nodes, and bounds the time of every schedule: a mixed integer program for any graph.

A cut is a node g. Cuts g_1, …, g_N are chosen so that each is a strict descendant of the one before. In every schedule
the ends of their first runs, T_1 < … < T_N, then part the step into intervals 0 … N. At T_j what g_j reads and makes is
in memory, and its workspace was. Nothing is assumed of the order within an interval, so that what the program proves
holds for every schedule of the step; what it finds is a schedule only where the memory between the cuts fits too.

| symbol | here | meaning | unit |
|---|---|---|---|
| n | `node` | a compute node; `maker(s)` makes s | – |
| s | `value` | a storage that is made in the step, or a gradient that waits when it starts | – |
| g_j | `cuts[j − 1]` | cut j, from 1 to N | – |
| T_j | – | the end of the first run of g_j | s |
| i | `interval` | from T_i to T_(i+1), without the former and with the latter; T_0 is the start | – |
| run[n, i] | `run` | n runs at least once in interval i | 0/1 |
| kept[s, j] | `kept` | s is in memory at T_j | 0/1 |
| since[n, j] | `since` | n runs at least once after T_j | 0/1 |
| h | `beside` | heavy nodes between cuts, each with its first run in one interval for certain | – |
| again[n, i] | `again` | n runs at least twice in interval i | 0/1 |
| lasts[s, i] | `lasts` | s is kept at T_(i+1), and nothing makes it late in interval i | 0/1 |
| time(n) | `time_s` | of one run of n | s |
| bytes(s) | `nbytes` | of s | byte |
| used[c] | `used` | a node of charge c runs: codes of a class of tensors that cost a part of the allowed error | 0/1 |
| share(c) | `share` | the part of it | – |
| held[m, s, j] | `held` | where only a part trains: s is kept at T_j for what reads it later under mask m | 0/1 |
| more[n] | `more` | runs of n beside one that is made under every mask, as a share of all masks | – |
| late[n, j] | `late` | the run of n that is made under every mask is one after T_j | 0/1 |
| base | `base_bytes` | in memory throughout the step | byte |
| workspace(n) | `workspace_bytes` | in memory only while n runs | byte |
| budget | `budget_bytes` | of the device | byte |

Most variables follow from the graph alone: ancestors of g_j have run before T_j, its strict descendants have not, and
what nobody reads any more is not kept. `Domain` says which are left; all others are numbers here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stowage.stages.formulations.cuts.beside import Beside, besides
from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.equations import EQUATIONS
from stowage.stages.formulations.cuts.masked import Masks
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solver.equations import add_equations
from stowage.stages.solver.milp import pulp

Key = tuple[int, int]

TIMES = 1e4
"""Time of every node once, in the unit of the program: solvers count with absolute tolerances."""

BYTES = 1e4
"""Bytes of the budget that are not `base`, in the unit of the program."""


@dataclass
class CutModel:
    """Holds data, variables and the program.

    Attributes:
        step: the graph of the step.
        cuts: g_1 to g_N.
        budget_bytes: the device's budget.
        domain: which variables there are.
        beside: for each node h, what must be in memory while it runs.
        masks: what of memory counts under some choices of what trains; None where everything does.
        integral: whether variables are integers; else this is the linear relaxation.
        total: the step's time as a variable, where collectives run beside computing; None where the objective is a sum.
        used: a variable for each charge.
        run, kept, since, again, lasts: variables by (node, interval), (value, cut), (node, cut), (node, interval) and
            (value, interval); only those that do not follow from the graph.
        sure: the number 1 as a variable, for the constant of the objective.
        problem: the program.
    """

    step: StepGraph
    cuts: Sequence[int]
    budget_bytes: int
    domain: Domain
    beside: Mapping[int, Sequence[Beside]]
    integral: bool = True
    masks: Masks | None = None
    run: Mapping[Key, Any] = field(init=False)
    kept: Mapping[Key, Any] = field(init=False)
    since: Mapping[Key, Any] = field(init=False)
    again: Mapping[Key, Any] = field(init=False)
    lasts: Mapping[Key, Any] = field(init=False)
    held: Sequence[Mapping[Key, Any]] = field(init=False)
    more: Mapping[int, Any] = field(init=False)
    late: Mapping[Key, Any] = field(init=False)
    used: Sequence[Any] = field(init=False)
    sure: Any = field(init=False)
    total: Any = field(init=False)
    problem: Any = field(init=False)

    def __post_init__(self) -> None:
        found = [b for row in self.beside.values() for b in row]
        self.run = self._variables("run", self.domain.free_runs)
        self.kept = self._variables("kept", self.domain.free_keeps)
        several = {(n, j) for n, i in self.run for j in range(1, i + 1) if len(self.free_after(n, j)) > 1}
        self.since = self._variables("since", several)
        self.again = self._variables("again", {b.remade for b in found if b.remade is not None and b.twice})
        self.lasts = self._variables("lasts", {(b.value, b.until[1] - 1) for b in found if b.until is not None})
        masks = self.masks if self.masks is not None else Masks()
        self.held = [self._variables(f"held_{m}", set(mask.counted)) for m, mask in enumerate(masks.masks)]
        self.more = {n: pulp.LpVariable(f"more_{n}", 0) for n in sorted(masks.rerun_s)}
        self.late = self._variables("late", set(masks.late))
        self.used = [pulp.LpVariable(f"used_{c}", 0, 1, self._kind) for c in range(len(self.step.charges))]
        self.sure = pulp.LpVariable("sure", 1, 1)
        self.total = pulp.LpVariable("total", 0) if any(n.collective for n in self.step.nodes) else None
        self.problem = pulp.LpProblem("cuts", pulp.LpMinimize)

    def _variables(self, name: str, keys: set[Key]) -> Mapping[Key, Any]:
        return {key: pulp.LpVariable(f"{name}_{key[0]}_{key[1]}", 0, 1, self._kind) for key in sorted(keys)}

    @property
    def _kind(self) -> str:
        found: str = pulp.LpBinary if self.integral else pulp.LpContinuous
        return found

    @property
    def intervals(self) -> range:
        """Return 0 … N."""
        return range(len(self.cuts) + 1)

    @cached_property
    def once_s(self) -> float:
        """Return the time below which no schedule can be, of nodes that run once."""
        return self.step.once_s

    @cached_property
    def time_unit_s(self) -> float:
        """Return the seconds of the program's unit of time."""
        return self.once_s / TIMES or 1.0

    @cached_property
    def byte_unit(self) -> float:
        """Return the bytes of the program's unit of memory."""
        return max(self.budget_bytes - self.step.base_bytes, 1) / BYTES

    def runs(self, node: int, interval: int) -> Any:
        """Return run[n, i]: a variable, or 0 or 1 where it follows from the graph."""
        return self.run.get((node, interval), int((node, interval) in self.domain.sure_runs))

    def keeps(self, value: int, cut: int) -> Any:
        """Return kept[s, j]: a variable, or 0 or 1 where it follows from the graph; at the start only what waits."""
        if not cut:
            return int(value in self.step.waiting)
        return self.kept.get((value, cut), int((value, cut) in self.domain.sure_keeps))

    def makes(self, value: int, interval: int) -> Any:
        """Return run[maker(s), i], of all makers; 0 for what nobody makes."""
        return sum(self.runs(maker, interval) for maker in self.step.makers.get(value, ()))

    def free_after(self, node: int, cut: int) -> list[int]:
        """Return the intervals after a cut in which a node may run or not; none where it runs in one for certain."""
        after = range(cut, len(self.cuts) + 1)
        return [] if self._certain_after(node, cut) else [i for i in after if (node, i) in self.run]

    def _certain_after(self, node: int, cut: int) -> bool:
        return self.domain.first[node][0] >= cut and node not in self.step.optional

    def runs_since(self, node: int, cut: int) -> Any:
        """Return since[n, j]: a variable, or what it is where at most one interval counts."""
        if (node, cut) in self.since:
            return self.since[node, cut]
        free = self.free_after(node, cut)
        if free:
            return self.run[node, free[0]]
        return int(self._certain_after(node, cut))

    def time_of(self, nodes: Iterable[int]) -> Any:
        """Return the time of all runs of some nodes, in units of `time_unit_s`."""
        wanted = set(nodes)
        times = [n.time_s / self.time_unit_s for n in self.step.nodes]
        more = {n: variable for n, variable in self.more.items() if n in wanted}
        free = [*self.run.items(), *self.again.items()]
        sure = sum(times[n] for n, _ in self.domain.sure_runs if n in wanted and n not in more)
        sure += sum(times[n] for n in more)  # its first run
        total = pulp.lpSum(times[n] * variable for (n, _), variable in free if n in wanted and n not in more)
        for node, variable in more.items():
            total += self.rerun_s(node) / self.time_unit_s * variable
        return sure * self.sure + total

    def rerun_s(self, node: int) -> float:
        """Return the time of a run of a node that has `more`; that of the node is the part that counts at least."""
        assert self.masks is not None
        return self.masks.rerun_s[node]

    def made_since(self, value: int, cut: int) -> Any:
        """Return whether a value is made after a cut: since[maker(s), j], of all makers."""
        return sum(self.runs_since(maker, cut) for maker in self.step.makers.get(value, ()))

    def held_parts(self) -> dict[Key, float]:
        """Return in the program's answer how much of each value is kept at each cut and not made again later."""
        found = {}
        for key in (*self.domain.sure_keeps, *self.kept):
            kept = _number(self.keeps(*key))
            part = kept - _number(self.made_since(*key))
            share = self.masks.missed.get(key, 0.0) if self.masks is not None else 0.0
            if share:
                part = max(part, kept - _number(self.more[self.step.maker[key[0]]]) / share)
            if part > 0:
                found[key] = part
        return found

    def remade(self, beside: Beside) -> Any:
        """Return the variable of the run that makes a value again before it is needed; 0 where nothing does."""
        if beside.remade is None:
            return 0
        return self.again[beside.remade] if beside.twice else self.runs(*beside.remade)


def _number(term: Any) -> float:
    return float(term if isinstance(term, (int, float)) else term.value() or 0.0)  # one that no row has is None


def build(
    step: StepGraph,
    cuts: Sequence[int],
    budget_bytes: int,
    *,
    heavy: Collection[int] = (),
    integral: bool = True,
    masks: Masks | None = None,
) -> CutModel:
    """Build the whole model; its objective is the time of a schedule in units of `time_unit_s`.

    Args:
        step: the graph of the step.
        cuts: g_1 to g_N.
        budget_bytes: the device's budget.
        heavy: nodes h between the cuts, each with its first run in one interval for certain.
        integral: make an integer program, not its linear relaxation.
        masks: see `CutModel`.
    """
    if heavy and step.optional:
        raise ValueError("what is in memory beside a node is known only of a step that is computed in one way")
    domain = Domain.of(step, cuts)
    beside = {h: list(besides(step, domain, cuts, h)) for h in sorted(heavy)}
    model = CutModel(step, cuts, budget_bytes, domain, beside, integral, masks)
    model.problem += model.total if model.total is not None else model.time_of(range(len(step.nodes))), "time"
    add_equations(model.problem, EQUATIONS, model)
    return model

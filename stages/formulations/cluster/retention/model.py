"""Retention intervals over an H-Graph: the CP-SAT model (after Moccasin; Bartan et al. 2023).

`solve.py` solves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.solver.cp import cp_model

_TIME_STEPS = 1_000_000
_LARGEST_MEMORY = 1 << 30


@dataclass(frozen=True)
class ClusterRun:
    """The m-th run of a node: presence literal (None: always), stage, first slot."""

    present: Any
    stage: Any
    start: Any


@dataclass(frozen=True)
class ClusterGroup:
    """Values of the same contributors that are made, read and released at the same steps."""

    values: tuple[int, ...]
    contributors: tuple[int, ...]
    readers: tuple[int, ...]
    nbytes: int
    final: bool

    @property
    def value(self) -> int:
        """Return one of the values."""
        return self.values[0]


@dataclass
class HRetentionModel:
    """Holds data and variables; the functions of this module add constraints."""

    data: HProblem
    unit: int
    time_unit: float
    computations: int
    recompute_backward: bool
    cp: Any = field(default_factory=lambda: cp_model.CpModel())
    runs: dict[int, list[ClusterRun]] = field(default_factory=dict)
    ways: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    reads: dict[tuple[int, int, int, int], Any] = field(default_factory=dict)
    starts: dict[tuple[int, int], Any] = field(default_factory=dict)
    ends: dict[tuple[int, int], Any] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)
    phantom_saved: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    later: dict[tuple[int, int], Any] = field(default_factory=dict)
    groups: list[ClusterGroup] = field(default_factory=list)

    @staticmethod
    def of(data: HProblem, budgets: Iterable[int], computations: int, *, recompute_backward: bool) -> HRetentionModel:
        """Make the variables, and the constraints that hold without budgets."""
        total_s = sum(max(way.time_s for way in ways) for ways in data.ways)
        unit = data.memory_unit(budgets, _LARGEST_MEMORY)
        model = HRetentionModel(data, unit, total_s / _TIME_STEPS or 1.0, computations, recompute_backward)
        model.groups = group_values(data)
        add_runs(model)
        add_ways(model)
        add_copies(model)
        return model

    def __post_init__(self) -> None:
        self.width = [max(len(way.steps) for way in ways) for ways in self.data.ways]
        self.offset = [sum(self.width[:k]) for k in range(self.data.size)]
        self.slots = sum(self.width)

    @property
    def horizon(self) -> int:
        """Return the number of slots."""
        return self.data.size * self.slots

    def first(self, k: int) -> int:
        """Return the slot in which node k first runs."""
        return k * self.slots + self.offset[k]


def group_values(data: HProblem) -> list[ClusterGroup]:
    """Merge values made and released together; those without bytes take no memory, but must be there to be read."""
    found: dict[object, list[int]] = {}
    for d in range(len(data.nbytes)):
        nodes = sorted({*data.contributors[d], *data.readers[d]})
        uses = tuple((way.birth(d), way.death(d), d in way.reads) for k in nodes for way in data.ways[k])
        key = (data.contributors[d], data.readers[d], uses, d in data.graph.final)
        found.setdefault(key, []).append(d)
    return [
        ClusterGroup(
            tuple(same),
            data.contributors[same[0]],
            data.readers[same[0]],
            sum(data.nbytes[d] for d in same),
            same[0] in data.graph.final,
        )
        for same in found.values()
    ]


def add_runs(model: HRetentionModel) -> None:
    """Add variables x, s and E; later runs are in later stages, and only exist if earlier ones do."""
    cp, T, data = model.cp, model.data.size, model.data
    sharing = {k for group in model.groups if len(group.contributors) > 1 for k in group.contributors}
    for k in range(T):
        model.runs[k] = [ClusterRun(None, k, model.first(k))]
        backward = k in data.backward_of or (k > data.graph.loss and not model.recompute_backward)
        if data.once(k) or backward or k in sharing or data.graph.nodes[k].plain is None:
            continue
        for m in range(1, model.computations):
            if k + m >= T:
                break
            present = cp.new_bool_var(f"x[{k},{m}]")
            stage = cp.new_int_var(k + m, T - 1, f"s[{k},{m}]")
            before = model.runs[k][-1]
            if m > 1:
                cp.add_implication(present, before.present)
                cp.add(stage >= before.stage + 1).only_enforce_if(present)
            # An absent run has one stage only, or equal answers would multiply.
            cp.add(stage == k + m).only_enforce_if(~present)
            model.runs[k].append(ClusterRun(present, stage, stage * model.slots + model.offset[k]))


def add_ways(model: HRetentionModel) -> None:
    """Add variables z: a run is in one way.

    One run of a cluster's forward leaves the phantom of the option that backward takes.
    """
    cp, data = model.cp, model.data
    for k, runs in model.runs.items():
        if k in data.cluster_of:
            continue
        for m, run in enumerate(runs):
            model.ways[k, m, 0] = cp.new_constant(1) if run.present is None else run.present
    for j, cluster in enumerate(data.graph.clusters):
        f, options = cluster.forward, range(len(cluster.options))
        for m, run in enumerate(model.runs[f]):
            for w in range(len(data.ways[f])):
                model.ways[f, m, w] = cp.new_bool_var(f"z[{f},{m},{w}]")
            chosen = sum(model.ways[f, m, w] for w in range(len(data.ways[f])))
            cp.add(chosen == (1 if run.present is None else run.present))
            for o in options:
                if m:
                    cp.add(run.stage <= cluster.backward).only_enforce_if(model.ways[f, m, o])
        for o in options:
            leaving = [model.ways[f, m, o] for m in range(len(model.runs[f]))]
            model.ways[cluster.backward, 0, o] = leaving[0] if len(leaving) == 1 else cp.new_bool_var(f"o[{j},{o}]")
            if len(leaving) > 1:
                cp.add(sum(leaving) == model.ways[cluster.backward, 0, o])
        cp.add_exactly_one([model.ways[cluster.backward, 0, o] for o in options])


def add_copies(model: HRetentionModel) -> None:
    """Add variables e and y: every run reads copies that are in memory, and copies last until they are read."""
    cp = model.cp
    for g, group in enumerate(model.groups):
        for m in range(len(model.runs[group.contributors[0]]) if len(group.contributors) == 1 else 1):
            model.ends[g, m] = cp.new_int_var(model.first(group.contributors[0]), model.horizon, f"e[{g},{m}]")
        for k in group.contributors:
            for m, run in enumerate(model.runs[k]):
                _lasts(model, g, m, k, m, run, None)
        if len(group.contributors) > 1:
            for r in group.readers:
                for j, reader in enumerate(model.runs[r]):
                    _lasts(model, g, 0, r, j, reader, None)
            if group.final:
                cp.add(model.ends[g, 0] >= model.horizon)
        elif len(model.runs[group.contributors[0]]) > 1:
            runs = model.runs[group.contributors[0]]
            for m in range(1, len(runs)):
                cp.add(model.ends[g, m - 1] <= runs[m].start).only_enforce_if(runs[m].present)
    of_node: dict[int, list[int]] = {}
    for g, group in enumerate(model.groups):
        if len(group.contributors) == 1:
            of_node.setdefault(group.contributors[0], []).append(g)
    for k, groups in of_node.items():
        for r in sorted({r for g in groups for r in model.groups[g].readers}):
            for j, reader in enumerate(model.runs[r]):
                _served(model, k, (r, j), reader, [g for g in groups if r in model.groups[g].readers])
        final = [g for g in groups if model.groups[g].final]
        if final:
            end = ClusterRun(None, model.data.size, model.horizon)
            _served(model, k, (model.data.size, 0), end, final)


def _served(model: HRetentionModel, k: int, key: tuple[int, int], reader: ClusterRun, groups: list[int]) -> None:
    """Serve the reader's run by exactly one run of k, whose copies are in memory."""
    cp, runs = model.cp, model.runs[k]
    r, j = key
    if len(runs) == 1:
        for g in groups:
            _lasts(model, g, 0, r, j, reader, None)
        return
    choices = []
    for m, run in enumerate(runs):
        y = cp.new_bool_var(f"y[{r},{j},{k},{m}]")
        model.reads[r, j, k, m] = y
        choices.append(y)
        for g in groups:
            _lasts(model, g, m, r, j, reader, y)
        if run.present is not None:
            cp.add_implication(y, run.present)
            # The staged order lets k feed r within one stage because k < r.
            cp.add(run.stage <= reader.stage).only_enforce_if(y)
    if reader.present is None:
        cp.add_exactly_one(choices)
    else:
        cp.add(sum(choices) == reader.present)


def _lasts(model: HRetentionModel, g: int, m: int, r: int, j: int, reader: ClusterRun, chosen: Any) -> None:
    """Keep copy m of group g until run j of node r, which makes or reads it, does not need it any more."""
    cp, end = model.cp, model.ends[g, m]
    if r == model.data.size:
        added = cp.add(end >= model.horizon)
        if chosen is not None:
            added.only_enforce_if(chosen)
        return
    group, ways = model.groups[g], model.data.ways[r]
    uses = {
        w: way.death(group.value) for w, way in enumerate(ways) if r in group.contributors or group.value in way.reads
    }
    same = len(uses) == len(ways) and len(set(uses.values())) == 1
    for w, death in uses.items():
        conditions = [] if chosen is None else [chosen]
        if not same:
            conditions.append(model.ways[r, j, w])
        elif reader.present is not None:
            conditions.append(reader.present)
        added = cp.add(end >= reader.start + death)
        if conditions:
            added.only_enforce_if(conditions)
        if same:
            return


def total_time(model: HRetentionModel) -> Any:
    """Return the total compute time, rounded down per run, so that the bound stays a bound."""
    terms: list[Any] = []
    for (k, _, w), chosen in model.ways.items():
        terms.append(int(model.data.ways[k][w].time_s / model.time_unit) * chosen)
    return sum(terms)

"""Judges schedules of an H-Graph by replay: legality, memory and time. It shares no code with any solver."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.h_graph import HAction, HGraph, HRun, HSchedule


@dataclass(frozen=True)
class HCost:
    """The cost of a schedule of an H-Graph.

    Attributes:
        time_s: all computations, seconds.
        forward_peak_bytes, backward_peak_bytes: highest memory before and from the loss on.
        save_bytes: in memory when the loss runs, what the loss makes left out.
        peak_node: a node at which the higher of both peaks is reached.
    """

    time_s: float
    forward_peak_bytes: int
    backward_peak_bytes: int
    save_bytes: int
    peak_node: int

    @property
    def peak_bytes(self) -> int:
        """Return the higher of both peaks."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


@dataclass
class _Memory:
    """The contents of memory: nodes whose contribution is in each value; the option whose phantom each cluster has."""

    values: dict[int, set[int]] = field(default_factory=dict)
    phantoms: dict[int, int] = field(default_factory=dict)


def replay_h_graph(graph: HGraph, schedule: HSchedule) -> HCost:
    """Replay `schedule`; raise `IllegalPlanError` at the first illegal row."""
    memory, ran = _Memory(), [0] * len(graph.nodes)
    time_s, save, peaks, peak_node = 0.0, 0, [0, 0], 0
    rows = schedule.actions
    for row, action in enumerate(rows):
        if action.kind != "compute":
            _free(memory, action, f"row {row}")
            continue
        k = action.index
        run = _legal(graph, memory, ran, action, f"row {row}")
        if k == graph.loss:
            save = _bytes(graph, memory)
        freed = _freed_directly_after(rows, row)
        peak = max(_bytes(graph, memory), _peak(graph, memory, action, run, freed))
        part = int(bool(ran[graph.loss]) or k == graph.loss)
        if peak > max(peaks):
            peak_node = k
        peaks[part] = max(peaks[part], peak)
        time_s += run.time_s
        ran[k] += 1
        for d in graph.nodes[k].makes:
            memory.values.setdefault(d, set()).add(k)
        for j, cluster in enumerate(graph.clusters):
            if cluster.forward == k and action.option is not None:
                memory.phantoms[j] = action.option
    never = [k for k, count in enumerate(ran) if not count]
    if never:
        raise IllegalPlanError(f"nodes {never} never run")
    complete = {d for d in memory.values if memory.values[d] == _contributors(graph, d)}
    if set(memory.values) != set(graph.final) or complete != set(graph.final) or memory.phantoms:
        raise IllegalPlanError(
            f"the schedule ends with values {sorted(memory.values)} ({sorted(complete)} complete) and phantoms "
            f"{sorted(memory.phantoms)} in memory, not with values {sorted(graph.final)}"
        )
    return HCost(time_s, peaks[0], peaks[1], save, peak_node)


def _contributors(graph: HGraph, value: int) -> set[int]:
    return {k for k, node in enumerate(graph.nodes) if value in node.makes}


def _legal(graph: HGraph, memory: _Memory, ran: list[int], action: HAction, where: str) -> HRun:
    """Return the run that this row asks for, if it may run now."""
    k = action.index
    node, runs = graph.nodes[k], graph.runs(k)
    what = f"{where}: node {k} ({node.name})"
    if action.option not in runs:
        raise IllegalPlanError(f"{what} has no option {action.option}")
    run = runs[action.option]
    for d in sorted({*node.reads, *run.reads}):
        if memory.values.get(d) != _contributors(graph, d):
            raise IllegalPlanError(f"{what} reads value {d} ({graph.values[d].name}), not complete in memory")
    for d in node.makes:
        if k in memory.values.get(d, ()):
            raise IllegalPlanError(f"{what} adds to value {d} ({graph.values[d].name}) what is already in it")
    if node.once and ran[k]:
        raise IllegalPlanError(f"{what} may run only once")
    if k == graph.loss and ran[k]:
        raise IllegalPlanError(f"{what} is the loss, which runs only once")
    if k > graph.loss and not ran[graph.loss]:
        raise IllegalPlanError(f"{what} is a backward node and runs before the loss")
    for j, cluster in enumerate(graph.clusters):
        if cluster.forward == k and action.option is not None and j in memory.phantoms:
            raise IllegalPlanError(f"{what} makes the phantom of cluster {j}, which is still in memory")
        if cluster.backward == k and memory.phantoms.get(j) != action.option:
            raise IllegalPlanError(f"{what} needs the phantom of option {action.option}, not in memory")
    return run


def _free(memory: _Memory, action: HAction, where: str) -> None:
    there: dict[int, set[int]] | dict[int, int]
    there = memory.values if action.kind == "free" else memory.phantoms
    if action.index not in there:
        thing = "value" if action.kind == "free" else "the phantom of cluster"
        raise IllegalPlanError(f"{where}: frees {thing} {action.index}, which is not in memory")
    del there[action.index]


def _freed_directly_after(rows: Sequence[HAction], row: int) -> set[tuple[str, int]]:
    """Return what the rows up to the next computation free."""
    freed: set[tuple[str, int]] = set()
    for action in rows[row + 1 :]:
        if action.kind == "compute":
            break
        freed.add((action.kind, action.index))
    return freed


def _bytes(graph: HGraph, memory: _Memory, *, without: Collection[int] = (), but_phantom: int | None = None) -> int:
    in_memory = sum(graph.values[d].nbytes for d in memory.values if d not in without)
    return in_memory + sum(
        graph.clusters[j].options[o].phantom_bytes for j, o in memory.phantoms.items() if j != but_phantom
    )


def _peak(graph: HGraph, memory: _Memory, action: HAction, run: HRun, freed: set[tuple[str, int]]) -> int:
    """Return the highest memory while one node runs: its own steps, and whatever it does not touch."""
    k, node = action.index, graph.nodes[action.index]
    touched = {*node.reads, *run.reads, *node.makes}
    backward = next((j for j, c in enumerate(graph.clusters) if c.backward == k), None)
    aside = _bytes(graph, memory, without=touched, but_phantom=backward)
    kept = backward is not None and ("free_phantom", backward) not in freed
    highest = 0
    for step in run.steps:
        there = {
            d
            for d in touched
            if not (d in step.unborn and d not in memory.values) and not (d in step.released and ("free", d) in freed)
        }
        now = aside + sum(graph.values[d].nbytes for d in there) + step.internal_bytes
        highest = max(highest, now + (step.phantom_released_bytes if kept else 0))
    return highest

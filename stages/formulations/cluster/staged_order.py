"""Executions of an H-Graph over Checkmate's staged order, and the schedule and cost that follow from them.

Stage t ends with the first execution of node t; in it every node k ≤ t may run once, in ascending order. Memory is
freed as early as it can be: every copy of a value right after its last use, a phantom right after its last backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.cluster.problem import ClusterWay, HProblem
from stowage.stages.ir.h_graph import HAction, HSchedule


@dataclass(frozen=True, order=True)
class ClusterExecution:
    """An execution of a node in a stage, with an option of its cluster or the plain way (None)."""

    stage: int
    option: int | None = None


HRuns = Mapping[int, Sequence[ClusterExecution]]
"""Executions of each node, ascending; the first is in the stage of the node's own number."""


@dataclass(frozen=True)
class Event:
    """An execution in the order of a schedule, with what it makes and frees.

    Attributes:
        stage, node: the stage, and the node that runs.
        way: the way in which it runs.
        made: values that it makes; those contributed to already are not among them.
        freed: values whose last use it is, ascending.
        drops_phantom: the phantom of its cluster is freed after it: it is the last backward to use it, or a forward
            whose phantom nobody uses.
    """

    stage: int
    node: int
    way: ClusterWay
    made: tuple[int, ...]
    freed: tuple[int, ...]
    drops_phantom: bool


@dataclass(frozen=True)
class HStagedCost:
    """Cost of a schedule, in seconds and bytes; `peak_event` is the position of the event at the peak."""

    time_s: float
    peak_bytes: int
    save_bytes: int
    peak_event: int

    def within(self, peak_bytes: int, save_bytes: int) -> bool:
        """Say whether both budgets hold."""
        return self.peak_bytes <= peak_bytes and self.save_bytes <= save_bytes


def timeline(problem: HProblem, runs: HRuns) -> tuple[Event, ...]:
    """Order the executions, with what each makes and frees."""
    order = sorted(
        (run.stage, k, position) for k, executions in runs.items() for position, run in enumerate(executions)
    )
    places = [(stage, k, _way_of(problem, k, runs[k][position])) for stage, k, position in order]
    needed = _until(problem, places)
    phantom_until = _phantoms_until(problem, places)
    events: list[Event] = []
    dying: dict[int, list[int]] = {}
    until: dict[int, int] = {}
    for e, (stage, k, way) in enumerate(places):
        made = tuple(d for d in problem.graph.nodes[k].makes if until.get(d, -1) < e)
        for d in problem.graph.nodes[k].makes:
            end = max(needed[e, d], e)
            if d in made:
                until[d] = end
                dying.setdefault(end, []).append(d)
        freed = tuple(sorted(dying.get(e, ())))
        events.append(Event(stage, k, way, made, freed, phantom_until.get(e) == e))
    return tuple(events)


def cost_of(problem: HProblem, events: Sequence[Event]) -> HStagedCost:
    """Compute time and memory of a timeline."""
    time_s, used, save, peak, where = 0.0, 0, 0, -1, 0
    nbytes = problem.nbytes
    for e, event in enumerate(events):
        way, backward = event.way, event.node in problem.backward_of
        if event.node == problem.graph.loss:
            save = used
        full = used + sum(nbytes[d] for d in event.made) - (way.phantom_bytes if backward else 0)
        highest = used
        for step in way.steps:
            now = full + step.internal_bytes
            now -= sum(nbytes[d] for d in step.unborn if d in event.made)
            now -= sum(nbytes[d] for d in step.released if d in event.freed)
            if backward and not event.drops_phantom:
                now += step.phantom_released_bytes
            highest = max(highest, now)
        if highest > peak:
            peak, where = highest, e
        time_s += way.time_s
        used = full - sum(nbytes[d] for d in event.freed) + (0 if event.drops_phantom else way.phantom_bytes)
    return HStagedCost(time_s, max(peak, used), save, where)


def schedule_of(problem: HProblem, events: Sequence[Event]) -> HSchedule:
    """Convert a timeline to rows."""
    rows: list[HAction] = []
    for event in events:
        rows.append(HAction("compute", event.node, event.way.option))
        rows.extend(HAction("free", d) for d in event.freed)
        if event.drops_phantom:
            rows.append(HAction("free_phantom", problem.cluster_of[event.node]))
    return HSchedule(tuple(rows))


def _way_of(problem: HProblem, k: int, run: ClusterExecution) -> ClusterWay:
    return next(way for way in problem.ways[k] if way.option == run.option)


def _until(problem: HProblem, places: Sequence[tuple[int, int, ClusterWay]]) -> dict[tuple[int, int], int]:
    """Return the event of the last use of each contribution (event, value); the event itself if it has none.

    A use is served by the latest run of every contributor; values that stay are used after the last event.
    """
    latest: dict[int, int] = {}
    until: dict[tuple[int, int], int] = {}
    for e, (_, k, way) in enumerate(places):
        for d in way.reads:
            for c in problem.contributors[d]:
                until[latest[c], d] = e
        latest[k] = e
        until.update({(e, d): e for d in problem.graph.nodes[k].makes})
    for d in problem.graph.final:
        for c in problem.contributors[d]:
            until[latest[c], d] = len(places)
    return until


def _phantoms_until(problem: HProblem, places: Sequence[tuple[int, int, ClusterWay]]) -> dict[int, int]:
    """Return, for each event that makes or uses a phantom, the event after which it is freed."""
    found: dict[int, int] = {}
    making: dict[int, list[int]] = {}
    for e, (_, k, way) in enumerate(places):
        if way.option is None:
            continue
        j = problem.cluster_of[k]
        if k in problem.forward_of:
            _close(found, making.pop(j, []))
            making[j] = [e]
        else:
            making[j].append(e)
    for users in making.values():
        _close(found, users)
    return found


def _close(found: dict[int, int], users: list[int]) -> None:
    found.update(dict.fromkeys(users, users[-1] if users else 0))

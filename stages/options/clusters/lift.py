"""Makes an option of an H-Cluster from executions inside a region (thesis 3.4.4.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.block.fixed import fast_forward
from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule
from stowage.stages.ir.executions import first_runs, needed_runs
from stowage.stages.ir.h_graph import HOption, HRun, HStep
from stowage.stages.options.clusters.regions import Region

MOST_STEPS = 12
"""Most steps of one run; neighbours that differ least are merged."""


@dataclass(frozen=True)
class LiftedLine:
    """Nodes of a region in the order in which they run; a node may run again."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def line_of(graph: BlockGraph, forward: Sequence[int], backward: Sequence[int]) -> LiftedLine:
    """Leave out repeated executions whose results nobody reads; first executions stay, since some have effects."""
    new, wanted = first_runs([*forward, *backward]), set(graph.outgoing)

    def needed(part: Sequence[int], stays: Sequence[bool]) -> tuple[int, ...]:
        nodes = graph.nodes
        kept = needed_runs(part, stays, wanted, lambda k: nodes[k].creates, lambda k: nodes[k].reads)
        return tuple(part[position] for position in kept)

    after = needed(backward, new[len(forward) :])
    wanted = wanted.difference(graph.incoming).union(graph.output)
    return LiftedLine(needed(forward, new[: len(forward)]), after)


def schedule_of(graph: BlockGraph, line: LiftedLine) -> BlockSchedule:
    """Make the schedule of these executions, with every copy freed right after its last use."""
    copies = _copies(graph, line)
    dying: dict[int, list[int]] = defaultdict(list)
    for (a, _), last in copies.items():
        dying[last].append(a)
    border = len(line.forward)
    parts: tuple[list[Action], list[Action]] = ([], [Action("free", a) for a in sorted(dying[border])])
    for position, k in _rows(line):
        part = parts[position > border]
        part.append(Action("compute", k))
        part.extend(Action("free", a) for a in sorted(dying[position]))
    return BlockSchedule(tuple(parts[0]), tuple(parts[1]))


def plain_run(region: Region) -> HRun:
    """Run forward alone, keeping what others need (fast-forward); values are named as in `lift`."""
    rows = tuple(a.index for a in fast_forward(region.graph).forward if a.kind == "compute")
    alone = replace(region, graph=replace(region.graph, incoming=(), outgoing=()))
    return _run(alone, LiftedLine(rows, ()), backward=False)


def lift(region: Region, line: LiftedLine, name: str) -> HOption:
    """Make the option that others see of a schedule of a region.

    Values in steps and reads are allocations of the region, and −1 − e for the one at position e of `external`.
    """
    own, border = _own_copies(region, line), len(line.forward)
    phantom = sum(region.graph.allocations[a].nbytes for a, made, last in own if made < border < last)
    return HOption(name, phantom, _run(region, line, backward=False), _run(region, line, backward=True))


def _rows(line: LiftedLine) -> list[tuple[int, int]]:
    """Return (position, node) pairs; the position between both parts is the loss's."""
    border = len(line.forward)
    return [*enumerate(line.forward), *((border + 1 + i, k) for i, k in enumerate(line.backward))]


def _copies(graph: BlockGraph, line: LiftedLine) -> dict[tuple[int, int], int]:
    """Return the position of the last use of each copy (allocation, position where made); past the end if it stays."""
    border, end = len(line.forward), len(line.forward) + len(line.backward) + 1
    rows = dict(_rows(line))
    made: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for position in range(end):
        if position == border:
            reads, creates = graph.output, graph.incoming
        else:
            node = graph.nodes[rows[position]]
            reads, creates = node.reads, node.creates
        for a in reads:
            last[a, made[a]] = position
        for a in creates:
            made[a] = position
            last[a, position] = position
    for a in graph.outgoing:
        last[a, made[a]] = end
    return last


def _own_copies(region: Region, line: LiftedLine) -> list[tuple[int, int, int]]:
    """Return (allocation, position where made, position of last use) of every copy that is used inside alone."""
    graph, border = region.graph, len(line.forward)
    leaving, outgoing = set(graph.output), set(graph.outgoing)
    return [
        (a, made, last)
        for (a, made), last in _copies(graph, line).items()
        if made != border and not (a in leaving and made < border) and not (a in outgoing and made > border)
    ]


def _run(region: Region, line: LiftedLine, *, backward: bool) -> HRun:
    """Describe one part as its parent sees it."""
    graph, border = region.graph, len(line.forward)
    change: dict[int, int] = defaultdict(int)
    freed: dict[int, int] = defaultdict(int)
    in_memory = 0
    for a, made, last in _own_copies(region, line):
        nbytes = graph.allocations[a].nbytes
        if backward and made < border < last:
            in_memory += nbytes
            freed[last + 1] += nbytes
        elif (made > border) == backward:
            change[made] += nbytes
            change[last + 1] -= nbytes
    crossing = _crossing(region, line, backward=backward)
    steps: list[HStep] = []
    phantom_released = 0
    rows = [(p, k) for p, k in _rows(line) if (p > border) == backward]
    for position, k in rows:
        in_memory += change[position] - freed[position]
        phantom_released += freed[position]
        steps.append(
            HStep(
                in_memory + graph.nodes[k].workspace_bytes,
                tuple(sorted(v for v, first in crossing.born.items() if first > position)),
                tuple(sorted(v for v, last in crossing.dead.items() if last < position)),
                phantom_released,
            )
        )
    time_s = sum(graph.nodes[k].time_s for _, k in rows)
    return HRun(time_s, _highest(steps), tuple(sorted(crossing.optional)))


@dataclass(frozen=True)
class _Crossing:
    """Values of the border in one part.

    Attributes:
        born: position at which each value appears that this part makes for others.
        dead: position of the last use here of each value that it takes from others.
        optional: values made in forward that backward takes from others in this way alone.
    """

    born: dict[int, int]
    dead: dict[int, int]
    optional: frozenset[int]


def _crossing(region: Region, line: LiftedLine, *, backward: bool) -> _Crossing:
    graph, border = region.graph, len(line.forward)
    leaving, outgoing = set(graph.output), set(graph.outgoing)
    born: dict[int, int] = {}
    dead: dict[int, int] = {}
    optional: set[int] = set()
    for (a, made), last in _copies(graph, line).items():
        if not backward:
            if a in leaving and made < border:
                born[a] = min(made, born.get(a, made))
        elif made == border:
            dead[a] = last
        elif a in outgoing and made > border:
            born[a] = made
        elif a in leaving and made < border < last:
            dead[a] = max(last, dead.get(a, last))
            optional.add(a)
    for position, k in _rows(line):
        if (position > border) == backward:
            for e in region.external_reads[k]:
                dead[-1 - e] = position
                if backward:
                    optional.add(-1 - e)
    return _Crossing(born, dead, frozenset(optional))


def _highest(steps: Sequence[HStep]) -> tuple[HStep, ...]:
    """Return, of steps with the same values in memory, those with most bytes, with the phantom as it is and kept."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[HStep]] = {}
    for step in steps:
        groups.setdefault((step.unborn, step.released), []).append(step)
    found: list[HStep] = []
    for group in groups.values():
        most = max(range(len(group)), key=lambda i: (group[i].internal_bytes, -i))
        kept = max(range(len(group)), key=lambda i: (group[i].internal_bytes + group[i].phantom_released_bytes, -i))
        found.extend(group[i] for i in sorted({most, kept}))
    while len(found) > MOST_STEPS:
        i = min(range(len(found) - 1), key=lambda i: (_differing(found[i], found[i + 1]), i))
        found[i : i + 2] = [_merged(found[i], found[i + 1])]
    return tuple(found) or (HStep(0),)


def _differing(one: HStep, two: HStep) -> int:
    """Count the values that are in memory in only one of two neighbours."""
    return len(one.unborn) - len(two.unborn) + len(two.released) - len(one.released)


def _merged(one: HStep, two: HStep) -> HStep:
    """Make one step that takes no less memory than either of two neighbours, whatever is kept."""
    most = max(one.internal_bytes, two.internal_bytes)
    with_phantom = max(s.internal_bytes + s.phantom_released_bytes for s in (one, two))
    return HStep(most, two.unborn, one.released, with_phantom - most)

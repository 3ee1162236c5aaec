"""Makes an H-Graph of a region with the options of regions inside, and reads its schedules as runs of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.cluster.offered_options import select_options, share_counts
from stowage.stages.ir.h_graph import HCluster, HGraph, HNode, HOption, HRun, HSchedule, HStep, HValue
from stowage.stages.options.clusters.lift import LiftedLine, line_of
from stowage.stages.options.clusters.order import backward_order
from stowage.stages.options.clusters.regions import Region, Single


@dataclass(frozen=True)
class RegionOption:
    """A schedule of a region: its executions, and the option that others see (see `lift`)."""

    line: LiftedLine
    seen: HOption


@dataclass(frozen=True)
class SolvedCluster:
    """The results of solving a region: its plain run of forward alone, and its options."""

    plain: HRun
    options: tuple[RegionOption, ...]


@dataclass(frozen=True)
class ClusterPlace:
    """The meaning of a node of the H-Graph: nodes of the region, or a part of a member."""

    nodes: tuple[int, ...]
    member: int = -1
    backward: bool = False


@dataclass(frozen=True)
class ClusterLevel:
    """A region as an H-Graph.

    Attributes:
        region: the region.
        graph: its H-Graph; every member is a node, or a forward and a backward node with options.
        places: the meaning of each node of `graph`; None for the loss.
        solved: the results of each member that is a region.
    """

    region: Region
    graph: HGraph
    places: tuple[ClusterPlace | None, ...]
    solved: Mapping[int, SolvedCluster]

    def line(self, schedule: HSchedule) -> LiftedLine:
        """Convert a schedule to executions of the region's nodes."""
        parts: tuple[list[int], list[int]] = ([], [])
        behind = False
        number = {k: i for i, k in enumerate(self.region.nodes)}
        for action in schedule.actions:
            if action.kind != "compute":
                continue
            place = self.places[action.index]
            if place is None:
                behind = True
                continue
            parts[behind].extend(self._nodes(place, action.option, number))
        return line_of(self.region.graph, *parts)

    def _nodes(self, place: ClusterPlace, option: int | None, number: Mapping[int, int]) -> Iterable[int]:
        if place.member < 0:
            return place.nodes
        inside = self.region.members[place.member]
        assert isinstance(inside, Region)
        if option is None:
            own: Sequence[int] = range(inside.graph.forward_count)
        else:
            line = self.solved[place.member].options[option].line
            own = line.backward if place.backward else line.forward
        return (number[inside.nodes[i]] for i in own)


def level_of(region: Region, solved: Mapping[str, SolvedCluster], most_options: int) -> ClusterLevel:
    """Make the H-Graph of a region.

    Args:
        region: the region.
        solved: the results of every region directly inside, by key.
        most_options: N_o, the most options of all clusters together (thesis 3.4.5).
    """
    inside = sorted({member.key for member in region.regions()})
    numbers = [len(solved[member.key].options) for member in region.regions()]
    share = dict(zip((member.key for member in region.regions()), share_counts(numbers, most_options)))
    return _Maker(region, {key: _selected(solved[key], share[key]) for key in inside}).level()


def _selected(known: SolvedCluster, count: int) -> SolvedCluster:
    by_name = {option.seen.name: option for option in known.options}
    chosen = select_options([option.seen for option in known.options], count)
    return SolvedCluster(known.plain, tuple(by_name[seen.name] for seen in chosen))


class _Maker:
    def __init__(self, region: Region, solved: Mapping[str, SolvedCluster]) -> None:
        self.region, self.solved = region, solved
        graph = region.graph
        number = {k: i for i, k in enumerate(region.nodes)}
        place = {a: i for i, a in enumerate(region.values)}
        hidden: set[int] = set()
        for inside in region.regions():
            seen = {*inside.graph.output, *inside.graph.outgoing, *inside.graph.incoming}
            hidden.update(place[a] for i, a in enumerate(inside.values) if i not in seen)
        visible = [a for a in range(len(graph.allocations)) if a not in hidden]
        self.at = {a: i for i, a in enumerate(visible)}
        self.number, self.place = number, place
        self.values = tuple(HValue(graph.allocations[a].name, graph.allocations[a].nbytes) for a in visible)

    def level(self) -> ClusterLevel:
        region, graph = self.region, self.region.graph
        nodes: list[HNode] = []
        places: list[ClusterPlace | None] = []
        forward_of: dict[int, int] = {}
        backward_of: dict[int, int] = {}
        known: dict[int, SolvedCluster] = {}
        for m, member in enumerate(region.members):
            if isinstance(member, Single):
                k = self.number[member.forward]
                nodes.append(self._single(k))
                places.append(ClusterPlace((k,)))
                continue
            known[m] = self.solved[member.key]
            forward_of[m] = len(nodes)
            nodes.append(self._forward(member, known[m]))
            places.append(ClusterPlace((), m))
        loss = len(nodes)
        nodes.append(HNode("loss", self._known(graph.output), self._known(graph.incoming), HRun(0.0), once=True))
        places.append(None)
        for behind in backward_order(region):
            member = region.members[behind.member]
            if isinstance(member, Single):
                (k,) = (self.number[k] for k in behind.nodes)
                nodes.append(self._single(k))
                places.append(ClusterPlace((k,)))
            else:
                backward_of[behind.member] = len(nodes)
                nodes.append(self._backward(member))
                places.append(ClusterPlace((), behind.member, backward=True))
        clusters = tuple(
            HCluster(forward_of[m], backward_of[m], tuple(self._option(region.members[m], o) for o in known[m].options))
            for m in sorted(backward_of)
        )
        made = HGraph(tuple(nodes), loss, self.values, clusters, self._known(graph.outgoing))
        return ClusterLevel(region, made, tuple(places), known)

    def _known(self, allocations: Iterable[int]) -> tuple[int, ...]:
        """Return the positions of allocations of the region among the values."""
        return tuple(sorted({self.at[a] for a in allocations}))

    def _inside(self, inside: Region, codes: Iterable[int]) -> tuple[int, ...]:
        """Return positions of values named as in `lift`; those from outside the region are resident, and left out."""
        found = (inside.external[-1 - c] if c < 0 else inside.values[c] for c in codes)
        return self._known(self.place[a] for a in found if a in self.place)

    def _single(self, k: int) -> HNode:
        node = self.region.graph.nodes[k]
        run = HRun(node.time_s, (HStep(node.workspace_bytes),))
        return HNode(node.name, self._known(node.reads), self._known(node.creates), run, node.once)

    def _forward(self, inside: Region, known: SolvedCluster) -> HNode:
        graph, count = inside.graph, inside.graph.forward_count
        reads = {-1 - e for k in range(count) for e in inside.external_reads[k]}
        once = any(n.once and n.creates for n in graph.nodes[:count])
        plain = None if once else self._run(inside, known.plain)
        if not inside.backward:
            plain = self._run(inside, known.plain)
        return HNode(graph.nodes[0].name, self._inside(inside, reads), self._inside(inside, graph.output), plain, once)

    def _backward(self, inside: Region) -> HNode:
        graph = inside.graph
        once = any(n.once for n in graph.nodes[graph.forward_count :])
        makes = self._inside(inside, graph.outgoing)
        return HNode(graph.nodes[-1].name, self._inside(inside, graph.incoming), makes, None, once)

    def _option(self, inside: Region | Single, option: RegionOption) -> HOption:
        assert isinstance(inside, Region)
        seen = option.seen
        return replace(seen, forward=self._run(inside, seen.forward), backward=self._run(inside, seen.backward))

    def _run(self, inside: Region, run: HRun) -> HRun:
        steps = tuple(
            replace(s, unborn=self._inside(inside, s.unborn), released=self._inside(inside, s.released))
            for s in run.steps
        )
        return replace(run, steps=steps, reads=self._inside(inside, run.reads))

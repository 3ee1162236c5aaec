"""Solves a large block through its clusters, from the smallest to the whole (HiRemate, thesis 3.2.2).

Equal regions are solved once. Every region but the whole is solved as blocks are, from its nodes (the thesis's direct
solvers: exactly where it is small, else by TW-Remat and greedy rules); large ones and those with regions inside as
H-Graphs too, once everything inside is known. Regions of one level, and budgets of one, are solved in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from stowage.stages.ir.block import BlockGraph, SolveReport
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.options.clusters.explore import HExploration, HFound
from stowage.stages.options.clusters.graphs import ClusterLevel, RegionOption, SolvedCluster, level_of
from stowage.stages.options.clusters.lift import LiftedLine, lift, line_of, plain_run, schedule_of
from stowage.stages.options.clusters.regions import Region, regions_of
from stowage.stages.options.sources import ClusterSource, source_of
from stowage.stages.options.tasks import Found, GridSize
from stowage.stages.options.workers.pool import Job
from stowage.stages.solver.outcome import SolverSettings

_Way = Literal["direct", "level"]

Direct = Callable[[BlockGraph, Callable[[list[Found]], Iterable[Job]]], Iterable[Job]]
"""Makes the jobs that solve a region from its nodes, given what follows when it is done."""


class HierarchyWork:
    """Solves the regions of one block.

    Attributes:
        top: the block itself.
    """

    def __init__(
        self,
        block: BlockGraph,
        clusters: Sequence[BlockCluster],
        size: GridSize,
        settings: SolverSettings,
        direct: Direct,
        finish: Callable[[list[Found]], Iterable[Job]],
    ) -> None:
        self.block, self.size, self.settings = block, size, settings
        self.top = regions_of(block, clusters)
        self._direct, self._finish = direct, finish
        self._regions: dict[str, Region] = {}
        self._above: dict[str, set[str]] = {}
        for region in _inside_first(self.top):
            self._regions.setdefault(region.key, region)
            for member in region.regions():
                self._above.setdefault(member.key, set()).add(region.key)
        self._missing = {key: {m.key for m in region.regions()} for key, region in self._regions.items()}
        self._lines: dict[str, dict[_Way, list[LiftedLine]]] = {key: {} for key in self._regions}
        self._solved: dict[str, SolvedCluster] = {}

    def first(self) -> list[Job]:
        """Return jobs for all regions from their nodes, and for those with nothing but nodes inside as H-Graphs."""
        jobs: list[Job] = []
        for key, region in self._regions.items():
            if "direct" in self._ways(region):
                jobs += self._direct(region.graph, partial(self._from_nodes, region))
            if not self._missing[key]:
                jobs += self._by_level(region)
        return jobs

    def _ways(self, region: Region) -> tuple[_Way, ...]:
        """Return the ways in which a region is solved."""
        if region.key == self.top.key:
            return ("level",)
        small = len(region.graph.nodes) <= self.size.max_exact_nodes
        return ("direct",) if small and not region.regions() else ("direct", "level")

    def _from_nodes(self, region: Region, found: Iterable[Found]) -> Iterable[Job]:
        return self._known(region, "direct", _lines(region, found))

    def _by_level(self, region: Region) -> Iterable[Job]:
        """Solve a region as an H-Graph, when everything inside is known."""
        if "level" not in self._ways(region):
            return ()
        whole = region.key == self.top.key
        level = level_of(region, self._solved, self.size.cluster_options)
        peaks = self.size.top_peaks if whole else self.size.cluster_peaks
        saves = (self.size.top_saves if self.block.output else 1) if whole else self.size.cluster_saves

        def follow(found: list[HFound]) -> Iterable[Job]:
            if whole:
                return self._whole(level, found)
            return self._known(region, "level", [level.line(f.schedule) for f in found])

        name = self.size.cluster_formulation
        share = source_of(ClusterSource, name, "options.cluster_formulation").share
        limits = replace(self.settings, time_limit_s=self.settings.time_limit_s * share)
        return [HExploration(level.graph, peaks, saves, limits, follow, name).first()]

    def _known(self, region: Region, way: _Way, lines: Iterable[LiftedLine]) -> Iterable[Job]:
        """Store the options of a region when all its ways are done, and start the regions that waited for it."""
        ways, arrived = self._ways(region), self._lines[region.key]
        arrived[way] = list(lines)
        if len(arrived) < len(ways):
            return
        distinct = list(dict.fromkeys(line for one in ways for line in arrived[one]))
        options = tuple(RegionOption(line, lift(region, line, str(i))) for i, line in enumerate(distinct))
        self._solved[region.key] = SolvedCluster(plain_run(region), options)
        for key in sorted(self._above.get(region.key, ())):
            self._missing[key].discard(region.key)
            if not self._missing[key]:
                yield from self._by_level(self._regions[key])

    def _whole(self, level: ClusterLevel, found: Iterable[HFound]) -> Iterable[Job]:
        """Make schedules of the block itself."""
        floor_s = sum(node.time_s for node in self.block.nodes)
        schedules: list[Found] = []
        for one in found:
            line = level.line(one.schedule)
            nodes = self.top.nodes
            mapped = line_of(self.block, [nodes[i] for i in line.forward], [nodes[i] for i in line.backward])
            time_s = sum(self.block.nodes[k].time_s for k in (*mapped.forward, *mapped.backward))
            report = SolveReport(one.report.formulation, "heuristic", time_s, min(floor_s, time_s))
            schedules.append(Found(schedule_of(self.block, mapped), report))
        return self._finish(schedules)


def _inside_first(region: Region) -> Iterator[Region]:
    for member in region.regions():
        yield from _inside_first(member)
    yield region


def _lines(region: Region, found: Iterable[Found]) -> Iterator[LiftedLine]:
    for one in found:
        parts = [
            [a.index for a in part if a.kind == "compute"] for part in (one.schedule.forward, one.schedule.backward)
        ]
        yield line_of(region.graph, *parts)

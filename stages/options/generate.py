"""Makes options of blocks: solves what the store lacks, judges by the referee, drops dominated options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from stowage.stages.ir.block import BlockGraph, SolveReport
from stowage.stages.ir.defaults import SOLVE_SECONDS
from stowage.stages.ir.encoding import encode, schedule_of
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.pareto import undominated
from stowage.stages.ir.plan import Option
from stowage.stages.options.clusters.regions import clusters_by_block
from stowage.stages.options.clusters.work import HierarchyWork
from stowage.stages.options.sources import Fixed, sources_of
from stowage.stages.options.store import OptionStore, block_key
from stowage.stages.options.tasks import Found, GridSize, fixed_policies
from stowage.stages.options.workers.pool import Answer, Job, work
from stowage.stages.options.workers.worker import (
    greedy_frontier_request,
    grid_request,
    row_request,
    unpack,
    unpack_grid,
)
from stowage.stages.simulate.last_run import with_costs, with_last_run_costs
from stowage.stages.solver.outcome import SolverSettings

Progress = Callable[[int, int], None]
"""Called with the numbers of distinct blocks done and in all, as options become available."""


def options_for_blocks(
    graphs: Iterable[BlockGraph],
    store: OptionStore | None = None,
    *,
    size: GridSize | None = None,
    settings: SolverSettings | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    clusters: Iterable[BlockCluster] = (),
) -> dict[str, list[Option]]:
    """Return options of every distinct block.

    Args:
        graphs: blocks; equal ones are solved once.
        store: the store of solved blocks; what it has is never solved again.
        size: budgets and limits of the search.
        settings: limits of each solve; by default `SOLVE_SECONDS`.
        workers: number of processes; the answer does not depend on it.
        progress: told how many distinct blocks are ready.
        clusters: clusters of blocks too large to be solved whole; without them greedy rules alone are used.

    Returns:
        Options by block hash, fastest first, with the referee's numbers. Keep-all and recompute-all are always among
        them; of the others none is dominated in total time, bytes saved, forward peak and backward peak together.

    Raises:
        IllegalPlanError: a formulation produced an illegal schedule (a bug).
    """
    size, settings = size or GridSize(), settings or SolverSettings(time_limit_s=SOLVE_SECONDS)
    distinct = {graph.content_hash(): graph for graph in graphs}
    inside = clusters_by_block(clusters)
    ready: dict[str, list[Option]] = {}
    solver = _Solver(size, settings, store)
    jobs: list[Job] = []

    def finish(name: str, options: list[Option]) -> Iterable[Job]:
        ready[name] = options
        if progress is not None:
            progress(len(ready), len(distinct))
        return ()

    for name, graph in sorted(distinct.items(), key=lambda item: -len(item[1].nodes)):
        jobs.extend(solver.block(graph, inside.get(name, ()), size, partial(finish, name)))
    work(jobs, workers)
    return {name: ready[name] for name in distinct}


def fixed_options(graphs: Iterable[BlockGraph]) -> dict[str, list[Option]]:
    """Return options of every distinct block by fixed policies alone, such as keep-all: none has to be searched.

    Args:
        graphs: blocks; equal ones have one entry.
    """
    distinct = {graph.content_hash(): graph for graph in graphs}
    return {name: options_of(graph, fixed_policies(graph)) for name, graph in distinct.items()}


Then = Callable[[list[Option]], Iterable[Job]]
"""Called with a block's options; returns the jobs that follow."""


@dataclass(frozen=True)
class _Solver:
    """Finds a block's options in the store, or makes jobs that solve it."""

    size: GridSize
    settings: SolverSettings
    store: OptionStore | None

    def block(self, graph: BlockGraph, clusters: Sequence[BlockCluster], size: GridSize, then: Then) -> Iterable[Job]:
        """Pass on the options in the store, or return the first jobs."""
        key = block_key(graph, size, self.settings, clusters)
        known = self.store.get(key, graph) if self.store is not None else None
        if known is not None:
            return then(known)

        def finish(options: list[Option]) -> Iterable[Job]:
            if self.store is not None:
                self.store.put(key, options)
            return then(options)

        if len(graph.nodes) <= size.max_exact_nodes:
            return [_GridWork(graph, size, self.settings, finish).first()]
        return self._large(graph, clusters, size, finish)

    def _large(
        self, graph: BlockGraph, clusters: Sequence[BlockCluster], size: GridSize, finish: Then
    ) -> Iterable[Job]:
        """Combine the greedy frontier and the schedules made from clusters."""
        parts = [_FROM_FRONTIERS, *([_FROM_CLUSTERS] if clusters else [])]
        found: dict[str, list[Found]] = {}

        def done(part: str, schedules: list[Found]) -> Iterable[Job]:
            found[part] = schedules
            return finish(options_of(graph, [f for p in parts for f in found[p]])) if len(found) == len(parts) else ()

        def direct(region: BlockGraph, follow: Callable[[list[Found]], Iterable[Job]]) -> Iterable[Job]:
            return self.block(region, (), size.inside(), lambda o: follow(found_of(o)))

        jobs = [
            Job(
                greedy_frontier_request(graph, size, self.settings),
                lambda answer: done(_FROM_FRONTIERS, unpack(answer)),
            )
        ]
        if clusters:
            jobs += HierarchyWork(graph, clusters, size, self.settings, direct, partial(done, _FROM_CLUSTERS)).first()
        return jobs


_FROM_FRONTIERS, _FROM_CLUSTERS = "from frontiers", "from clusters"


@dataclass
class _GridWork:
    """Solves one block by tasks: first the grid, then its rows."""

    graph: BlockGraph
    size: GridSize
    settings: SolverSettings
    finish: Then
    answers: dict[int, list[Found]] = field(default_factory=dict)
    expected: int = 0

    def first(self) -> Job:
        return Job(grid_request(self.graph, self.size, self.settings), self._planned)

    def _planned(self, answer: Answer) -> list[Job]:
        budgets = unpack_grid(answer)
        self.answers[-1] = list(budgets.found)
        self.expected = len(budgets.peaks) + 1
        return [
            Job(row_request(self.graph, budgets, peak, self.size, self.settings), self._row(position))
            # Small peaks take longest: they come first, so that no worker is left with one at the end.
            for position, peak in reversed(list(enumerate(budgets.peaks)))
        ]

    def _row(self, position: int) -> Callable[[Answer], Iterable[Job]]:
        def follow(answer: Answer) -> Iterable[Job]:
            self.answers[position] = unpack(answer)
            if len(self.answers) < self.expected:
                return ()
            found = [f for key in sorted(self.answers) for f in self.answers[key]]
            return self.finish(options_of(self.graph, found))

        return follow


def found_of(options: Iterable[Option]) -> list[Found]:
    """Convert options to schedules with reports."""
    return [
        Found(
            schedule_of(o),
            SolveReport(
                o.formulation,
                "heuristic",
                o.forward_time_s + o.backward_time_s,
                (1 - o.gap) * (o.forward_time_s + o.backward_time_s),
            ),
        )
        for o in options
    ]


def options_of(graph: BlockGraph, found: Iterable[Found]) -> list[Option]:
    """Replay every schedule and keep the options worth having, numbered fastest first.

    Raises:
        IllegalPlanError: a schedule is illegal (a formulation's bug).
    """
    block_hash = graph.content_hash()
    judged = [
        with_costs(
            Option(
                block_hash=block_hash,
                option=0,
                forward=encode(one.schedule.forward),
                backward=encode(one.schedule.backward),
                formulation=one.report.formulation,
                status=one.report.status,
                gap=one.report.gap,
            ),
            graph,
        )
        for one in found
    ]
    return [replace(with_last_run_costs(o, graph), option=position) for position, o in enumerate(_undominated(judged))]


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Keep fixed policies, and options that no other is no worse than in every respect; fastest first."""
    fixed = {policy.name for policy in sources_of(Fixed)}
    ordered = sorted(options, key=lambda o: (*_costs(o), o.formulation not in fixed, o.gap, o.forward, o.backward))

    def no_worse(one: Option, two: Option) -> bool:
        return two.formulation not in fixed and all(a <= b for a, b in zip(_costs(one), _costs(two), strict=True))

    return undominated(ordered, no_worse)


def _costs(option: Option) -> tuple[float, int, int, int]:
    """Return the costs of an option, rounded: equal computations in another order take the same time."""
    time_s = float(f"{option.forward_time_s + option.backward_time_s:.12g}")
    return time_s, option.save_bytes, option.forward_peak_bytes, option.backward_peak_bytes

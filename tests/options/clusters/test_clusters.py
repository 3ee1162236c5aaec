"""Blocks solved by clusters: regions, what a schedule looks like from outside, and schedules of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.fixed import keep_all
from stowage.stages.formulations.block.retention import solve_executions
from stowage.stages.formulations.block.staged_order import StagedGraph, cost_of, timeline
from stowage.stages.formulations.cluster.as_chain import HChain
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.retention.solve import h_retention
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.plan import Option
from stowage.stages.options.clusters.explore import HFound
from stowage.stages.options.clusters.graphs import ClusterLevel, RegionOption, SolvedCluster, level_of
from stowage.stages.options.clusters.lift import LiftedLine, lift, plain_run, schedule_of
from stowage.stages.options.clusters.owners import owners
from stowage.stages.options.clusters.regions import Region, regions_of
from stowage.stages.options.clusters.work import HierarchyWork
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.tasks import Found, GridSize, fixed_policies
from stowage.stages.options.workers.pool import Job
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.simulate.block import BlockCost, replay_block
from stowage.stages.simulate.h_graph import replay_h_graph
from stowage.stages.solver.outcome import SolverSettings
from tests.matrix import examples, some
from tests.options.clusters.made_clusters import clusters_of
from tests.options.clusters.test_h_explore import explored
from tests.strategies import attention_block, deep_chain, mlp_block, small_blocks

TINY = Limits(top_size=3, size=3, smallest=2)
QUICK = SolverSettings(time_limit_s=0.5)


def inside_first(region: Region) -> Iterator[Region]:
    for member in region.regions():
        yield from inside_first(member)
    yield region


def solved_upwards(top: Region) -> Iterator[tuple[ClusterLevel, list[tuple[HFound, LiftedLine]]]]:
    """Every region as an H-Graph with its schedules, those inside before those that hold them."""
    known: dict[str, SolvedCluster] = {}
    for region in inside_first(top):
        level = level_of(region, known, most_options=60)
        level.graph.check()
        found = [(f, level.line(f.schedule)) for f in explored(level.graph, 3, 2, QUICK)]
        yield level, found
        if region is not top:
            options = (RegionOption(line, lift(region, line, str(i))) for i, (_, line) in enumerate(found))
            known[region.key] = SolvedCluster(plain_run(region), tuple(options))


def cost(region: Region, line: LiftedLine) -> BlockCost:
    return replay_block(region.graph, schedule_of(region.graph, line))


def check_regions(graph: BlockGraph, top: Region) -> None:
    assert sorted(top.nodes) == list(range(len(graph.nodes)))
    for region in inside_first(top):
        forward = region.graph.forward_count
        assert all(k < graph.forward_count for k in region.nodes[:forward])
        assert all(k >= graph.forward_count for k in region.nodes[forward:])
        made: set[int] = set()
        for node in region.graph.nodes[:forward]:
            assert made.issuperset(node.reads)
            made.update(node.creates)
        made.update(region.graph.incoming)
        for node in region.graph.nodes[forward:]:
            assert made.issuperset(node.reads), "backward nodes stand in an order in which they can run"
            made.update(node.creates)
        assert made.issuperset(region.graph.output)
        assert made.issuperset(region.graph.outgoing)


def check_levels(top: Region) -> None:
    """From outside a schedule never looks cheaper than it is, and what it holds across the loss is told exactly."""
    for level, found in solved_upwards(top):
        assert HChain.of(HProblem(level.graph)) is not None, "clusters run backward in the opposite order of forward"
        for one, line in found:
            outside = replay_h_graph(level.graph, one.schedule)
            true = cost(level.region, line)
            assert true.forward_time_s + true.backward_time_s <= outside.time_s * (1 + 1e-9)
            assert true.forward_peak_bytes <= outside.forward_peak_bytes
            assert true.backward_peak_bytes <= outside.backward_peak_bytes
            assert true.save_bytes <= outside.save_bytes


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_blocks(max_forward=7))
def test_random_blocks(graph: BlockGraph) -> None:
    top = regions_of(graph, clusters_of(graph, TINY))
    check_regions(graph, top)
    check_levels(top)


def test_owners_never_rise_and_updates_come_last() -> None:
    for graph in (attention_block(), mlp_block(), deep_chain(4)):
        order = list(range(graph.forward_count))
        found = owners(graph, order)
        made: dict[int, int] = {}
        least = graph.forward_count
        for node, owner in zip(graph.nodes[graph.forward_count :], found, strict=True):
            assert all(owner <= made[a] for a in node.reads if a in made)
            least = min(least, owner)
            assert node.creates or owner == least
            made.update(dict.fromkeys(node.creates, owner))


def test_the_backward_of_an_operation_belongs_to_it() -> None:
    graph = attention_block()
    forward = {n.name: k for k, n in enumerate(graph.nodes[: graph.forward_count])}
    owner = dict(
        zip((n.name for n in graph.nodes[graph.forward_count :]), owners(graph, list(range(graph.forward_count))))
    )
    for operation in ("mul2", "mul", "layernorm"):
        assert owner[f"{operation}'"] == forward[operation]
    # It reads what softmax made and the product read: either is right.
    assert owner["softmax'"] in (forward["softmax"], forward["mul"])
    assert owner["proj.w'"] == forward["proj"]
    assert owner["scores.q'"] == owner["scores.k'"] == forward["scores"]


def test_equal_layers_are_one_region() -> None:
    graph = deep_chain(8)
    top = regions_of(graph, clusters_of(graph, Limits(top_size=4, size=6)))
    check_regions(graph, top)
    regions = list(inside_first(top))
    assert len({r.key for r in regions}) <= len(regions) // 2
    check_levels(top)


@pytest.mark.parametrize("build", [attention_block, mlp_block])
def test_realistic_blocks_level_by_level(build: Callable[[], BlockGraph]) -> None:
    graph = build()
    top = regions_of(graph, clusters_of(graph, Limits(top_size=6, size=5)))
    assert top.regions()
    check_regions(graph, top)
    check_levels(top)


@pytest.mark.parametrize("build", [attention_block, mlp_block])
@pytest.mark.parametrize("share", some([0.8, 0.65, 0.55], keep=[0.65]))
def test_clusters_alone_come_close_to_the_optimum(build: Callable[[], BlockGraph], share: float) -> None:
    """Within 3% of the optimum on blocks for which that is known, with the clusters that H-Partition makes of them."""
    graph = build()
    staged = StagedGraph.of(graph)
    plain = replay_block(graph, keep_all(graph))
    budget = int(max(plain.forward_peak_bytes, plain.backward_peak_bytes) * share)
    patient = SolverSettings(time_limit_s=20.0)
    executions, report = solve_executions(graph, budget, budget, patient, computations=2)
    top = regions_of(graph, clusters_of(graph, Limits()))
    level = level_of(top, {}, most_options=60)
    (answer,) = h_retention(level.graph, [(budget, budget)], patient)
    if executions is None:
        # Only what runs a node more often than both models may, fits.
        assert answer.feasible is False or (answer.runs and max(len(runs) for runs in answer.runs.values()) > 2)
        return
    assert report is not None
    assert report.status == "optimal"
    assert answer.schedule is not None
    found = cost(top, level.line(answer.schedule))
    assert max(found.forward_peak_bytes, found.backward_peak_bytes) <= budget
    best_s = cost_of(staged, timeline(staged, executions)).time_s
    assert found.forward_time_s + found.backward_time_s <= best_s * 1.03


def test_a_large_block_is_solved_by_clusters_too() -> None:
    graph = deep_chain(6)
    size = GridSize(2, 2, max_exact_nodes=30, greedy_levels=6, cluster_peaks=2, cluster_saves=2, top_peaks=2)
    rows = clusters_of(graph, Limits(top_size=8, size=6))
    name = graph.content_hash()
    one = options_for_blocks([graph], None, size=size, settings=QUICK, clusters=rows)[name]
    two = options_for_blocks([graph], None, size=size, settings=QUICK, clusters=rows * 2, workers=2)[name]
    assert one == two
    assert any(o.formulation.startswith("h_") for o in one)
    alone = options_for_blocks([graph], None, size=size, settings=QUICK)[name]
    assert min(_peak(o) for o in one) <= min(_peak(o) for o in alone)
    assert all(a.forward_time_s + a.backward_time_s <= b.forward_time_s + b.backward_time_s for a, b in pairwise(one))


def test_every_cluster_is_solved_from_its_nodes_too() -> None:
    """Direct solvers apply at every level (thesis 3.2.2): a cluster with clusters inside has options of both kinds."""
    graph = deep_chain(12)
    size = GridSize(2, 2)
    asked: dict[str, Callable[[list[Found]], Iterable[Job]]] = {}

    def direct(region: BlockGraph, follow: Callable[[list[Found]], Iterable[Job]]) -> Iterable[Job]:
        asked[region.content_hash()] = follow
        return ()

    clusters = clusters_of(graph, Limits(top_size=3, size=4))
    work = HierarchyWork(graph, clusters, size, QUICK, direct, lambda found: ())
    assert work.first() == []  # H-Graphs wait for what is inside
    inside = {region.key: region for region in inside_first(work.top) if region.key != work.top.key}
    assert set(asked) == {region.graph.content_hash() for region in inside.values()}
    upper = [region for region in inside.values() if region.regions()]
    assert upper
    jobs = [
        job
        for region in inside.values()
        if not region.regions()
        for job in asked[region.graph.content_hash()](fixed_policies(region.graph))
    ]
    assert {job.request["task"] for job in jobs} == {"h_ends"}
    waiting = asked[upper[0].graph.content_hash()]
    assert list(waiting(fixed_policies(upper[0].graph))) == []  # what holds it waits for its H-Graph too


def _peak(option: Option) -> int:
    return max(option.forward_peak_bytes, option.backward_peak_bytes)

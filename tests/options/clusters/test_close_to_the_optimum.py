"""The hierarchical formulation alone, against the optimum, on blocks of models and random ones for which that can be
proven."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.fixed import keep_all
from stowage.stages.formulations.block.retention import smallest_peak, solve_executions
from stowage.stages.formulations.block.staged_order import StagedGraph, cost_of, timeline
from stowage.stages.formulations.cluster.retention.solve import h_retention
from stowage.stages.ir.block import BlockGraph
from stowage.stages.options.clusters.graphs import RegionOption, SolvedCluster, level_of
from stowage.stages.options.clusters.lift import lift, plain_run, schedule_of
from stowage.stages.options.clusters.regions import Region, regions_of
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings
from tests.matrix import examples
from tests.options.clusters.made_clusters import clusters_of
from tests.options.clusters.test_clusters import inside_first
from tests.options.clusters.test_h_explore import explored
from tests.solve.prepared import prepare_model, prepared_zoo
from tests.strategies import small_blocks
from tests.zoo import REMAT, ZOO

LIMITS = SolverSettings(time_limit_s=5.0)
SHARES = (0.0, 0.3, 0.6)
"""Of what lies between the smallest peak and plain PyTorch's."""

MODELS = (
    "gpt2", "gpt2_mask", "bert", "phi", "resnet", "resnet_transformers", "transformer", "batchnorm", "tied",
    "unet", "uno", "mixer",
)  # fmt: skip


def small_blocks_of(name: str) -> Iterator[BlockGraph]:
    """Distinct blocks that leave something to choose."""
    blocks = (prepared_zoo(name) if name in ZOO else prepare_model(REMAT[name], name)).blocks
    for graph in {b.block_hash: BlockGraph.from_json(b.graph) for b in blocks}.values():
        if 12 <= len(graph.nodes) <= 60:
            yield graph


def known_inside(top: Region) -> dict[str, SolvedCluster]:
    """Options of every region inside."""
    known: dict[str, SolvedCluster] = {}
    for region in inside_first(top):
        if region is top:
            continue
        level = level_of(region, known, most_options=60)
        lines = [level.line(f.schedule) for f in explored(level.graph, 4, 3, LIMITS)]
        options = tuple(RegionOption(line, lift(region, line, str(i))) for i, line in enumerate(lines))
        known[region.key] = SolvedCluster(plain_run(region), options)
    return known


def check(graph: BlockGraph) -> int:
    """Budgets for which the optimum is known, all of them met within 3% of it."""
    staged, plain = StagedGraph.of(graph), replay_block(graph, keep_all(graph))
    peak = max(plain.forward_peak_bytes, plain.backward_peak_bytes)
    _, least = smallest_peak(graph, LIMITS)
    top = regions_of(graph, clusters_of(graph, Limits()))
    level = level_of(top, known_inside(top), most_options=200)
    proven = 0
    for share in SHARES:
        budget = int(least + (peak - least) * share)
        executions, report = solve_executions(graph, budget, budget, LIMITS)
        if executions is None or report is None or report.status != "optimal":
            continue
        proven += 1
        (answer,) = h_retention(level.graph, [(budget, budget)], LIMITS, recompute_backward=True)
        assert answer.schedule is not None
        found = replay_block(top.graph, schedule_of(top.graph, level.line(answer.schedule)))
        assert max(found.forward_peak_bytes, found.backward_peak_bytes) <= budget
        best_s = cost_of(staged, timeline(staged, executions)).time_s
        assert found.forward_time_s + found.backward_time_s <= best_s * 1.03
    return proven


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_models(name: str) -> None:
    assert sum(check(graph) for graph in small_blocks_of(name)) >= len(SHARES)


@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_blocks(max_forward=7))
def test_random_blocks_too(graph: BlockGraph) -> None:
    check(graph)

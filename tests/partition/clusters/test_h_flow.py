"""Real models as graphs to partition, and their hierarchies."""

from __future__ import annotations

from functools import cache

import pytest

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.clusters.flow import Flow, forward_flow
from stowage.stages.partition.clusters.partition import MOST_LEVELS, Limits, h_partition, partition_score
from stowage.stages.partition.fold import fold
from stowage.stages.trace import trace_step
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.partition.clusters import algorithm7
from tests.partition.clusters.hierarchies import judge
from tests.solve.synthetic_steps import costs_for
from tests.zoo import GPT2, ZOO

MODELS = ("gpt2_mask", "t5", "transformer", "unet", "resnet", "lstm", "gpt2_bf16", "batchnorm", "two_outputs")
SMALL = Limits(top_size=8, size=6)


@cache
def traced(name: str) -> TraceTables:
    model, batch, loss = ZOO[name]()
    return trace_step(model, batch, loss=loss, label=name)


def flow_of(trace: TraceTables) -> Flow:
    return forward_flow(trace, costs_for(trace))


@cache
def gpt2(layers: int) -> Flow:
    model = build_model("gpt2", {**GPT2, "n_layer": layers}, seed=0)
    return flow_of(trace_step(model, sample_batch(model, 2, 12, 1)))


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_what_forward_computes(name: str) -> None:
    trace = traced(name)
    flow = flow_of(trace)
    flow.graph.check()
    forward = {n.calls: n for n in fold(trace, costs_for(trace)).nodes if n.phase == "forward"}
    assert {n.calls for n in flow.nodes} <= forward.keys()
    made: dict[int, int] = {}
    for node, flow_node in zip(flow.nodes, flow.graph.nodes, strict=True):
        assert [flow.storages[v] for v in flow_node.creates] == list(node.creates)
        assert {flow.storages[v] for v in flow_node.reads} == made.keys() & set(node.reads)
        made.update(dict.fromkeys(node.creates, node.node))
    assert [flow.storages[v] for v in flow.graph.results] == [trace.values[trace.meta.loss_value].storage]
    for v, storage in enumerate(flow.storages):
        assert flow.graph.value_bytes[v] == trace.storages[storage].nbytes
    left_out = [n for calls, n in forward.items() if calls not in {m.calls for m in flow.nodes}]
    assert all(not n.random and not n.mutates for n in left_out)


@pytest.mark.parametrize("name", MODELS)
def test_hierarchies_of_models_are_legal_and_no_worse_than_algorithm_7(name: str) -> None:
    graph = flow_of(traced(name)).graph
    hierarchy = h_partition(graph, SMALL)
    judge(hierarchy, SMALL)
    reference = algorithm7.partition(graph, SMALL.top_size, SMALL.size, SMALL.alpha, most_levels=MOST_LEVELS)
    if reference is not None:
        theirs = sum(algorithm7.score(graph, c, SMALL.alpha) for c in reference[0])
        assert partition_score(hierarchy) <= theirs * (1 + 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_effects_keep_their_order(name: str) -> None:
    """Random draws, and changes of buffers, in whatever order the clusters run."""
    flow = flow_of(traced(name))
    hierarchy = h_partition(flow.graph, SMALL)
    order = [flow.nodes[n] for n in hierarchy.nodes_of(hierarchy.top)]
    assert _effects(order) == _effects(sorted(order, key=lambda n: n.node))


def _effects(nodes: list[ComputeNode]) -> tuple[list[int], dict[int, list[int]]]:
    changed = {s for n in nodes for s in n.mutates}
    touched = {s: [n.node for n in nodes if s in n.reads or s in n.mutates] for s in sorted(changed)}
    return [n.node for n in nodes if n.random], touched


def test_a_deeper_model_has_the_same_clusters_more_often() -> None:
    limits = Limits(top_size=6, size=12)
    found = []
    for layers in (6, 12):
        flow = gpt2(layers)
        hierarchy = h_partition(flow.graph, limits)
        judge(hierarchy, limits)
        found.append([c for c in hierarchy.clusters if c.level == 1])
    few, many = ({c.cluster_hash for c in clusters} for clusters in found)
    assert len(found[1]) > 1.8 * len(found[0])
    assert len(many) <= len(few) + 1
    assert len(few & many) >= len(few) - 1

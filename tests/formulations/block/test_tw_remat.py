"""TW-Remat: legal anywhere, logarithmic memory on chains, fast when large; tree decompositions are what they say."""

from __future__ import annotations

import math
import time

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.fixed import keep_all
from stowage.stages.formulations.block.greedy.selective import selective_frontier
from stowage.stages.formulations.block.staged_order import StagedGraph, schedule_of
from stowage.stages.formulations.block.tw_remat.any_order import candidate_of_order, order_of, retain, useful
from stowage.stages.formulations.block.tw_remat.order import NodeGraph, TooLongError, TreewidthOrder
from stowage.stages.formulations.block.tw_remat.relief import relieved
from stowage.stages.formulations.block.tw_remat.solve import tw_candidates, tw_remat
from stowage.stages.formulations.block.tw_remat.trees import decompose
from stowage.stages.ir.block import BlockGraph
from stowage.stages.simulate.block import replay_block
from tests.formulations.block.brute import fastest
from tests.formulations.block.budgets import peak_of, total_s
from tests.matrix import examples
from tests.strategies import BlockBuilder, attention_block, deep_chain, small_blocks

QUICK = settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def chain(length: int) -> BlockGraph:
    """Equal layers of one byte; backward of each reads its input."""
    b = BlockBuilder()
    values = [b.add("f0", 1.0, [], 1)[0]]
    for i in range(1, length):
        values.append(b.add(f"f{i}", 1.0, [values[-1]], 1)[0])
    (g,) = b.loss([values[-1]])
    for i in range(length - 1, 0, -1):
        (g,) = b.add(f"b{i}", 1.0, [g, values[i - 1]], 1)
    return b.build([g])


@QUICK
@given(small_blocks(max_forward=9))
def test_every_schedule_is_legal_and_costed_right(graph: BlockGraph) -> None:
    staged = StagedGraph.of(graph)
    plain = sum(node.time_s for node in graph.nodes)
    found = tw_candidates(staged, 8)
    for c in found:
        cost = replay_block(graph, schedule_of(staged, c.line))
        assert abs(total_s(cost) - c.cost.time_s) < 1e-9
        assert c.cost.time_s >= plain
        assert (cost.save_bytes, cost.forward_peak_bytes, cost.backward_peak_bytes) == (
            c.cost.save_bytes,
            c.cost.forward_peak_bytes,
            c.cost.backward_peak_bytes,
        )
    assert replay_block(graph, tw_remat(graph, 8)[0][0]) == replay_block(graph, keep_all(graph))


@QUICK
@given(small_blocks(max_forward=9))
def test_first_runs_ascend_and_backward_runs_once(graph: BlockGraph) -> None:
    staged = StagedGraph.of(graph)
    nodes = NodeGraph.of(staged)
    for straight in (0, 3, 8):
        order = TreewidthOrder(nodes, straight).everything()
        assert list(dict.fromkeys(order)) == list(range(len(staged.nodes)))
        for k, node in enumerate(staged.nodes):
            if node.once or k >= staged.loss:
                assert order.count(k) == 1


@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_blocks(max_forward=3))
def test_never_better_than_exhaustive_search(graph: BlockGraph) -> None:
    for schedule, report in tw_remat(graph, 6):
        cost = replay_block(graph, schedule)
        best = fastest(graph, peak_of(cost), cost.save_bytes, staged=False)
        assert best is not None
        assert report.bound_s - 1e-9 <= best <= report.objective_s + 1e-9


def test_memory_grows_like_the_logarithm_of_a_chain() -> None:
    """Each halving of the chain holds one more separator, of width + 1 nodes at most; plain PyTorch holds them all."""
    for length in (16, 64, 256):
        graph = chain(length)
        nodes = NodeGraph.of(StagedGraph.of(graph))
        order = TreewidthOrder(nodes, 0).everything()
        smallest = min(c.cost.peak_bytes for c in tw_candidates(StagedGraph.of(graph), 8))
        # Two thirds of the nodes remain at most, in each level.
        levels = math.ceil(math.log(2 * length, 1.5))
        assert nodes.tree.width == 2
        assert candidate_of_order(StagedGraph.of(graph), order).cost.peak_bytes <= 2 * levels
        assert smallest <= 2 * math.log2(length) + 2
        assert len(order) <= 2 * length * levels
        assert peak_of(replay_block(graph, keep_all(graph))) > length


def test_it_goes_lower_than_segments_on_a_deep_model() -> None:
    graph = deep_chain(40)
    plain = replay_block(graph, keep_all(graph))
    frontier = [replay_block(graph, schedule) for schedule, _ in tw_remat(graph)]
    assert min(peak_of(cost) for cost in frontier) <= 0.05 * peak_of(plain)
    half = [total_s(cost) for cost in frontier if peak_of(cost) <= 0.5 * peak_of(plain)]
    assert min(half) <= 1.09 * total_s(plain)
    assert [total_s(cost) for cost in frontier] == sorted(total_s(cost) for cost in frontier)
    assert len(frontier) >= 20


@pytest.mark.long
def test_four_times_the_nodes_take_less_than_four_squared_times_as_long() -> None:
    taken: list[float] = []
    for layers in (36, 143):
        graph = deep_chain(layers)
        started = time.process_time()
        found = tw_remat(graph)
        taken.append(time.process_time() - started)
    assert len(graph.nodes) > 2000
    assert taken[1] < 14 * taken[0]
    plain = replay_block(graph, keep_all(graph))
    assert min(peak_of(replay_block(graph, schedule)) for schedule, _ in found) <= 0.02 * peak_of(plain)


def test_equal_inputs_give_equal_schedules() -> None:
    assert tw_remat(deep_chain(6), 6) == tw_remat(deep_chain(6), 6)


def test_an_order_that_is_too_long_is_given_up() -> None:
    nodes = NodeGraph.of(StagedGraph.of(deep_chain(6)))
    whole = len(TreewidthOrder(nodes, 0).everything())
    assert len(TreewidthOrder(nodes, 0, longest=whole).everything()) == whole
    with pytest.raises(TooLongError):
        TreewidthOrder(nodes, 0, longest=whole - 1).everything()


def test_what_is_kept_runs_once() -> None:
    staged = StagedGraph.of(deep_chain(6))
    nodes = NodeGraph.of(staged)
    order = TreewidthOrder(nodes, 0).everything()
    again = {k for k in order if order.count(k) > 1}
    assert again
    kept = frozenset(sorted(again)[::2])
    order = TreewidthOrder(nodes, 0, kept).everything()
    assert {k for k in order if order.count(k) > 1}.isdisjoint(kept)


@QUICK
@given(small_blocks(max_forward=9))
def test_a_decomposition_is_one(graph: BlockGraph) -> None:
    """Every node and every pair that is in memory together has a bag, bags of a node are connected, and a separator
    leaves parts that know nothing of each other."""
    reads = NodeGraph.of(StagedGraph.of(graph)).reads
    tree = decompose(reads)
    for node, read in enumerate(reads):
        assert any({node, *read} <= bag for bag in tree.bags)
        having = [i for i, bag in enumerate(tree.bags) if node in bag]
        assert tree.bag_of[node] == having[0]
        assert all(node in tree.bags[tree.parent[i]] for i in having[1:])
    everything = list(range(len(tree.bags)))
    chosen = tree.separator(everything, range(len(reads)), [1] * len(reads), 0.5)
    parts, part_of = tree.without(everything, chosen)
    assert sorted(bag for part in parts for bag in part) == sorted(set(everything) - {chosen})
    left = nx.Graph([(p, n) for n, read in enumerate(reads) for p in read])
    left.add_nodes_from(range(len(reads)))
    left.remove_nodes_from(tree.bags[chosen])
    for component in nx.connected_components(left):
        assert len(component) <= len(reads) / 2
        assert len({part_of[tree.bag_of[node]] for node in component}) == 1


def test_retaining_keeps_the_budgets_and_saves_time() -> None:
    graph = StagedGraph.of(deep_chain(12))
    plain = candidate_of_order(graph, range(len(graph.nodes))).cost
    small = useful(graph, TreewidthOrder(NodeGraph.of(graph), 0).everything())
    before = candidate_of_order(graph, small).cost
    times = []
    for limit in (before.peak_bytes, (before.peak_bytes + plain.peak_bytes) // 2, plain.peak_bytes):
        order = retain(graph, small, limit, plain.save_bytes)
        after = candidate_of_order(graph, order)
        assert after.cost.within(limit, plain.save_bytes)
        assert order_of(after) == order
        replay_block(graph.block, schedule_of(graph, after.line))
        times.append(after.cost.time_s)
    assert before.time_s >= times[0] > times[1] > times[2]
    assert times[2] == pytest.approx(plain.time_s)
    tight = retain(graph, small, plain.peak_bytes, before.save_bytes)
    assert candidate_of_order(graph, tight).cost.save_bytes <= before.save_bytes


@QUICK
@given(small_blocks(max_forward=9))
def test_retaining_is_legal_within_any_budgets(graph: BlockGraph) -> None:
    staged = StagedGraph.of(graph)
    order = useful(staged, TreewidthOrder(NodeGraph.of(staged), 0).everything())
    cost = candidate_of_order(staged, order).cost
    for extra in (0, 2, 7):
        peak, save = cost.peak_bytes + extra, cost.save_bytes + extra
        after = candidate_of_order(staged, retain(staged, order, peak, save))
        assert after.cost.within(peak, save)
        assert after.cost.time_s <= cost.time_s
        replay_block(graph, schedule_of(staged, after.line))


def test_attention_goes_as_low_as_choices_in_the_staged_order() -> None:
    graph = attention_block()
    greedy = min(peak_of(replay_block(graph, schedule)) for schedule, _ in selective_frontier(graph))
    ours = min(peak_of(replay_block(graph, schedule)) for schedule, _ in tw_remat(graph))
    assert ours <= greedy < 0.7 * peak_of(replay_block(graph, keep_all(graph)))


@QUICK
@given(small_blocks(max_forward=9))
def test_relief_is_legal_and_lowers_the_peak_or_how_often_it_is_reached(graph: BlockGraph) -> None:
    staged = StagedGraph.of(graph)
    plain = candidate_of_order(staged, range(len(staged.nodes)))

    def repeatable(k: int) -> bool:
        return k < staged.loss and not staged.nodes[k].once

    last = plain.cost.peak_bytes
    for c in relieved(staged, plain, repeatable, 20):
        replay_block(graph, schedule_of(staged, c.line))
        assert c.cost.peak_bytes <= last
        last = c.cost.peak_bytes


def test_relief_alone_finds_the_smallest_peak_of_attention() -> None:
    staged = StagedGraph.of(attention_block())
    plain = candidate_of_order(staged, range(len(staged.nodes)))
    found = list(relieved(staged, plain, lambda k: k < staged.loss, 100))
    assert found[-1].cost.peak_bytes < 0.7 * plain.cost.peak_bytes
    assert found == list(relieved(staged, plain, lambda k: k < staged.loss, 100))
    assert list(relieved(staged, plain, lambda k: False, 100)) == []

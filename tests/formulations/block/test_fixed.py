"""Fixed policies are legal everywhere, and mean what they say."""

from __future__ import annotations

from hypothesis import given, settings

from stowage.stages.formulations.block.fixed import fast_forward, keep_all, recompute_all
from stowage.stages.formulations.block.staged_order import StagedGraph, cost_of, run_once, timeline
from stowage.stages.ir.block import BlockGraph
from stowage.stages.simulate.block import replay_block
from tests.matrix import examples
from tests.strategies import MIB, attention_block, small_blocks


@settings(max_examples=examples(100), deadline=None)
@given(small_blocks(max_forward=6))
def test_legal(graph: BlockGraph) -> None:
    plain = replay_block(graph, keep_all(graph))
    again = replay_block(graph, recompute_all(graph))
    fast = replay_block(graph, fast_forward(graph), complete=False)
    assert plain.recomputed_bytes == 0
    # What a `once` node made cannot be made again, so it may have to be kept for the sake of others.
    if not any(node.once for node in graph.nodes[: graph.forward_count]):
        assert again.save_bytes <= plain.save_bytes
    assert fast.save_bytes == sum(graph.allocations[a].nbytes for a in graph.output)
    assert fast.forward_peak_bytes <= plain.forward_peak_bytes


@settings(max_examples=examples(60), deadline=None)
@given(small_blocks(max_forward=6))
def test_our_own_count_agrees_with_the_referee(graph: BlockGraph) -> None:
    staged = StagedGraph.of(graph)
    ours, referee = cost_of(staged, timeline(staged, run_once(staged))), replay_block(graph, keep_all(graph))
    assert ours.save_bytes == referee.save_bytes
    assert ours.forward_peak_bytes == referee.forward_peak_bytes
    assert ours.backward_peak_bytes == referee.backward_peak_bytes


def test_attention() -> None:
    graph = attention_block()
    again = replay_block(graph, recompute_all(graph))
    assert again.save_bytes == 3 * MIB
    assert fast_forward(graph).backward == ()
    # `proj`, `mul2` and `add` lead to nothing that backward reads.
    runs = [a.index for a in recompute_all(graph).backward if a.kind == "compute" and a.index < graph.forward_count]
    assert [graph.nodes[k].name for k in runs if k >= 12] == ["bernoulli2"]

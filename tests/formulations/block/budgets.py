"""Budgets to test with, and the checks that every schedule must pass."""

from __future__ import annotations

from hypothesis import strategies as st

from stowage.stages.formulations.block.fixed import keep_all
from stowage.stages.ir.block import BlockGraph, BlockSchedule
from stowage.stages.simulate.block import BlockCost, replay_block
from tests.strategies import small_blocks


def total_s(cost: BlockCost) -> float:
    """Time of both parts."""
    return cost.forward_time_s + cost.backward_time_s


def peak_of(cost: BlockCost) -> int:
    """Higher of both peaks."""
    return max(cost.forward_peak_bytes, cost.backward_peak_bytes)


def checked(graph: BlockGraph, schedule: BlockSchedule, peak: int, save: int) -> BlockCost:
    """The referee's verdict, budgets included."""
    cost = replay_block(graph, schedule)
    assert peak_of(cost) <= peak
    assert cost.save_bytes <= save
    return cost


@st.composite
def blocks_and_budgets(draw: st.DrawFn, max_forward: int = 3) -> tuple[BlockGraph, int, int]:
    """A small block, M_peak between the largest node's need and plain PyTorch's peak, M_save above the output."""
    graph = draw(small_blocks(max_forward=max_forward))
    plain = replay_block(graph, keep_all(graph))
    need = max(
        node.workspace_bytes + sum(graph.allocations[a].nbytes for a in (*node.reads, *node.creates))
        for node in graph.nodes
    )
    output = sum(graph.allocations[a].nbytes for a in graph.output)
    peak = draw(st.integers(need, max(need, peak_of(plain))))
    return graph, peak, draw(st.integers(output, max(output, plain.save_bytes)))

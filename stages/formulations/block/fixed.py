"""Fixed policies that every planner must beat: keep everything, recompute everything, fast-forward."""

from __future__ import annotations

from stowage.stages.formulations.block.staged_order import StagedGraph, run_once, schedule_of, timeline
from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule


def keep_all(graph: BlockGraph) -> BlockSchedule:
    """Run every node once and free every allocation right after its last use, as plain PyTorch does."""
    staged = StagedGraph.of(graph)
    return schedule_of(staged, timeline(staged, run_once(staged)))


def recompute_all(graph: BlockGraph) -> BlockSchedule:
    """Checkpoint the whole block: keep the output alone, then run forward again before the first backward node.

    Outputs of `once` nodes cannot be made again and are kept. Only nodes that lead to something that backward reads run
    again.
    """
    staged = StagedGraph.of(graph)
    executions = run_once(staged)
    if staged.loss + 1 < len(staged.nodes):
        for k in _needed_again(staged):
            executions[k].append(staged.loss + 1)
    return schedule_of(staged, timeline(staged, executions))


def fast_forward(graph: BlockGraph) -> BlockSchedule:
    """Run forward alone and keep only the block's output (F^∅ of Rotor, thesis 2.1.2); backward is empty."""
    last_use = {a: k for k in range(graph.forward_count) for a in graph.nodes[k].creates}
    for k in range(graph.forward_count):
        last_use.update(dict.fromkeys(graph.nodes[k].reads, k))
    dying: dict[int, list[int]] = {}
    for a, k in sorted(last_use.items()):
        if a not in graph.output:
            dying.setdefault(k, []).append(a)
    rows: list[Action] = []
    for k in range(graph.forward_count):
        rows.append(Action("compute", k))
        rows.extend(Action("free", a) for a in dying.get(k, ()))
    return BlockSchedule(tuple(rows), ())


def _needed_again(graph: StagedGraph) -> list[int]:
    """Return the forward nodes to run again to make everything that backward reads, if only the output was kept."""
    kept = set(graph.block.output)
    wanted = {a for node in graph.nodes[graph.loss + 1 :] for a in node.reads}
    wanted |= set(graph.block.outgoing)
    again: list[int] = []
    for k in range(graph.loss - 1, -1, -1):
        node = graph.nodes[k]
        if not node.once and any(a in wanted and a not in kept for a in node.creates):
            again.append(k)
            wanted.update(node.reads)
    return again[::-1]

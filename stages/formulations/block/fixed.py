"""The fixed policies every planner must beat: keep everything, recompute everything, fast-forward."""

from __future__ import annotations

from stowage.stages.formulations.block.staged_order import StagedGraph, run_once, schedule_of, timeline
from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule


def keep_all(graph: BlockGraph) -> BlockSchedule:
    """Plain PyTorch: every node once, every allocation freed right after its last use."""
    staged = StagedGraph.of(graph)
    return schedule_of(staged, timeline(staged, run_once(staged)))


def recompute_all(graph: BlockGraph) -> BlockSchedule:
    """Checkpointing of the whole block: keep the output alone, then run forward again before the first backward node.

    Outputs of `once` nodes cannot be made again and are kept. Only what leads to something that backward reads is run
    again.
    """
    staged = StagedGraph.of(graph)
    executions = run_once(staged)
    if staged.loss + 1 < len(staged.nodes):
        for k in _needed_again(staged):
            executions[k].append(staged.loss + 1)
    return schedule_of(staged, timeline(staged, executions))


def fast_forward(graph: BlockGraph) -> BlockSchedule:
    """F^∅ of Rotor (thesis 2.1.2): forward alone, nothing kept but the block's output; backward is empty."""
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
    """Forward nodes to run again so that all that backward reads exists although only the output was kept."""
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

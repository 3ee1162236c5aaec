"""Tiny steps of any shape: nodes that draw, run once, sum, write in place, exchange, use up what waited, update."""

from __future__ import annotations

from hypothesis import strategies as st

from stowage.stages.formulations.cuts.step_graph import StepGraph, after_changes
from stowage.stages.ir.graph import ComputeNode

TIME_S = 1e-3


@st.composite
def tiny_steps(draw: st.DrawFn, max_nodes: int = 9) -> StepGraph:
    """A step of a few nodes: any graph, or a chain forward and what reads its values backward."""
    count = draw(st.integers(2, max_nodes))
    turn = (count + 1) // 2 if draw(st.integers(0, 3)) else count
    nbytes: list[int] = []
    waiting: list[int] = []
    nodes: list[ComputeNode] = []
    made: list[int] = []
    for _ in range(draw(st.integers(0, 1))):
        waiting.append(len(nbytes))
        nbytes.append(draw(st.integers(1, 8)))
    weights = [len(nbytes)] if draw(st.booleans()) else []
    nbytes += [0] * len(weights)  # it counts in `base_bytes`
    for number in range(count):
        if turn < count:
            reads = set(made[-1:]) | set(made[2 * turn - 1 - number : 2 * turn - number] if number >= turn else ())
        else:
            reads = draw(st.sets(st.sampled_from(made), max_size=2)) if made else set[int]()
        mutates = [w for w in waiting if draw(st.integers(0, 3)) == 0]
        if made and not draw(st.integers(0, 7)):
            mutates.append(draw(st.sampled_from(made)))
        mutates += [w for w in weights if draw(st.integers(0, 3)) == 0]
        reads |= {w for w in weights if draw(st.booleans())}
        creates = []
        for _ in range(draw(st.integers(0 if number + 1 == count else 1, 2 if number == 0 else 1))):
            creates.append(len(nbytes))
            nbytes.append(draw(st.integers(1, 8)))
        takes = tuple(
            s for s in sorted(reads.difference(weights)) if len(creates) == 1 and draw(st.integers(0, 5)) == 0
        )
        for s in takes:
            nbytes[s] = nbytes[creates[0]]
        nodes.append(
            ComputeNode(
                node=number,
                calls=(),
                reads=tuple(sorted(reads)),
                creates=tuple(creates),
                mutates=tuple(mutates),
                phase="update" if set(mutates) & set(waiting) else "forward",
                block=-1,
                once=bool(mutates) or draw(st.integers(0, 6)) == 0,
                random=draw(st.integers(0, 3)) == 0,
                time_s=draw(st.integers(1, 5)) * TIME_S,
                workspace_bytes=draw(st.integers(0, 2)),
                estimated=False,
                name=f"node {number}",
                takes=takes,
                collective=draw(st.integers(0, 5)) == 0,
            )
        )
        made += creates
    return StepGraph(
        nodes=nodes,
        nbytes=nbytes,
        base_bytes=draw(st.integers(0, 3)),
        waiting=frozenset(waiting),
        stays=frozenset(draw(st.sets(st.sampled_from(made), max_size=1))),
        once=frozenset(n.node for n in nodes if n.once),
        after=after_changes(nodes, {*waiting, *weights}),
    )


def peak_bytes(step: StepGraph) -> int:
    """The memory in which every node runs once, in order, and each value is freed after its last reader."""
    last = {s: max([step.maker.get(s, -1), *readers]) for s, readers in step.readers.items()}
    last |= dict.fromkeys(step.stays, len(step.nodes))
    live, peak = set(step.waiting), 0
    for node in step.nodes:
        live |= set(node.creates)
        peak = max(peak, step.base_bytes + sum(step.nbytes[s] for s in live) + node.workspace_bytes)
        live = {s for s in live if last[s] > node.node}
    return peak


@st.composite
def chains_of_cuts(draw: st.DrawFn, step: StepGraph) -> tuple[int, ...]:
    """Nodes of a step, each a strict descendant of the one before."""
    cuts: list[int] = []
    for node in range(len(step.nodes)):
        if (not cuts or step.precedes(cuts[-1], node)) and draw(st.booleans()):
            cuts.append(node)
    return tuple(cuts)

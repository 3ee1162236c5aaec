"""Tiny steps of any shape: nodes that draw, run once, sum, write in place, exchange, use up what waited, update."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from stowage.stages.formulations.cuts.step_graph import StepGraph, after_changes
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Phase

TIME_S = 1e-3

KINDS = (
    "runs once",
    "draws after another",
    "writes over what was made",
    "waiting gradient",
    "two waiting gradients",
    "update",
    "update of what others read",
    "two weights",
    "backward",
    "sum",
    "exchange",
)
"""What a step may have that a program of cuts must know of."""


FEATURES = ("waiting", "weights", "once", "random", "in place", "sums", "exchanges")
"""What the nodes of one step may be: where they are all of it nothing is left to run again."""


@st.composite
def tiny_steps(draw: st.DrawFn, max_nodes: int = 7) -> StepGraph:
    """A step of a few nodes: any graph, or a chain forward and what reads its values backward; updates come beside."""
    made_step = _Making(draw, [f for f in FEATURES if draw(st.booleans())])
    count = draw(st.integers(2 if draw(st.integers(0, 7)) == 0 else min(6, max_nodes), max_nodes))
    turn = (count + 1) // 2 if draw(st.integers(0, 4)) < 4 else 0
    for number in range(count):
        last = number + 1 == count
        made_step.compute(turn, last=last)
        if made_step.may_update(turn) and not last and draw(st.integers(0, 3)) < 3:
            made_step.update()
    return made_step.finished()


class _Making:
    """A step in the making."""

    def __init__(self, draw: st.DrawFn, features: Collection[str]) -> None:
        self._draw, self._features = draw, features
        self._nbytes: list[int] = []
        self._computed = 0
        self._forward: list[list[int]] = []
        """What each node of forward made that no node of backward has read."""
        self.nodes: list[ComputeNode] = []
        self.made: list[int] = []
        waiting, weights = (draw(st.integers(1, 2)) if f in features else 0 for f in ("waiting", "weights"))
        self.waiting = [self._value(draw(st.integers(1, 4))) for _ in range(waiting)]
        self.weights = [self._value(0) for _ in range(weights)]  # they count in `base_bytes`

    def _value(self, nbytes: int) -> int:
        self._nbytes.append(nbytes)
        return len(self._nbytes) - 1

    def _is(self, feature: str, odds: int) -> bool:
        return feature in self._features and self._draw(st.integers(0, odds)) == 0

    @property
    def _not_updated(self) -> list[int]:
        changed = {s for n in self.nodes for s in n.mutates}
        return [w for w in self.weights if w not in changed]

    def may_update(self, turn: int) -> bool:
        """Whether there is something to update: from the second node of backward on."""
        return bool(self.made and self._not_updated) and self._computed > turn

    def update(self) -> None:
        """An update of a weight by what was made before, and by a gradient that waits; it creates nothing."""
        draw = self._draw
        gradients = {draw(st.sampled_from(self.made[-2:]))}
        gradients |= {w for w in self.waiting if draw(st.integers(0, 2)) == 0}
        self._add("update", gradients, [], [draw(st.sampled_from(self._not_updated))], once=True)

    def compute(self, turn: int, last: bool) -> None:
        """A node that computes: of the chain forward, backward, or of anything that was made."""
        draw, made, number = self._draw, self.made, self._computed
        self._computed += 1
        backward = 0 < turn <= number
        if turn and draw(st.integers(0, 7)) < 7:
            reads = set(made[-1:]) | set(self._forward.pop() if backward and self._forward else ())
        else:
            reads = draw(st.sets(st.sampled_from(made), max_size=2)) if made else set[int]()
        mutates = [w for w in self.waiting if draw(st.integers(0, 7)) == 0]
        if made and self._is("in place", 5):
            mutates.append(draw(st.sampled_from(made)))
        mutates += [w for w in self.weights if draw(st.integers(0, 31)) == 0]
        reads |= {w for w in self.weights if draw(st.booleans())}
        fewest, most = 0 if last or mutates else 1, 2 if number == 0 else 1
        largest = 4 if backward else 8
        creates = [self._value(draw(st.integers(1, largest))) for _ in range(draw(st.integers(fewest, most)))]
        summands = sorted(reads.difference(self.weights, mutates)) if len(creates) == 1 else ()
        takes = [s for s in summands if self._is("sums", 3)]
        for s in takes:
            self._nbytes[s] = self._nbytes[creates[0]]
        if not backward:
            self._forward.append(creates)
        self._add(
            "backward" if backward else "forward",
            reads,
            creates,
            mutates,
            takes,
            once=bool(mutates) or self._is("once", 4),
            random=self._is("random", 2),
            collective=self._is("exchanges", 4),
        )

    def _add(
        self,
        phase: Phase,
        reads: set[int],
        creates: Sequence[int],
        mutates: Sequence[int],
        takes: Sequence[int] = (),
        *,
        once: bool,
        random: bool = False,
        collective: bool = False,
    ) -> None:
        self.nodes.append(
            ComputeNode(
                node=len(self.nodes),
                calls=(),
                reads=tuple(sorted(reads)),
                creates=tuple(creates),
                mutates=tuple(mutates),
                phase=phase,
                block=-1,
                once=once,
                random=random,
                time_s=self._draw(st.integers(1, 5)) * TIME_S,
                workspace_bytes=self._draw(st.integers(0, 2)),
                estimated=False,
                name=f"node {len(self.nodes)}",
                takes=tuple(takes),
                collective=collective,
            )
        )
        self.made += creates

    def finished(self) -> StepGraph:
        """The step, whose last node uses up all that still waits."""
        used = {s for n in self.nodes for s in (*n.reads, *n.mutates)}
        last = self.nodes[-1]
        self.nodes[-1] = replace(last, reads=tuple(sorted({*last.reads, *set(self.waiting).difference(used)})))
        return StepGraph(
            nodes=self.nodes,
            nbytes=self._nbytes,
            base_bytes=self._draw(st.integers(0, 3)),
            waiting=frozenset(self.waiting),
            stays=frozenset(self._draw(st.sets(st.sampled_from(self.made), max_size=1)) if self.made else ()),
            once=frozenset(n.node for n in self.nodes if n.once),
            after=after_changes(self.nodes, {*self.waiting, *self.weights}),
        )


def kinds_of(step: StepGraph) -> frozenset[str]:
    """Which of `KINDS` a step has."""
    nodes, made = step.nodes, set(step.maker)
    updates = [n for n in nodes if n.phase == "update" and not n.creates and n.node + 1 < len(nodes)]
    has = {
        "runs once": any(n.node in step.once and not n.mutates for n in nodes),
        "draws after another": sum(n.random for n in nodes) > 1,
        "writes over what was made": any(made.intersection(n.mutates) for n in nodes),
        "waiting gradient": bool(step.waiting),
        "two waiting gradients": len(step.waiting) > 1,
        "update": bool(updates),
        "update of what others read": any(not step.once.issuperset(step.after.get(n.node, ())) for n in updates),
        "two weights": len({s for n in nodes for s in n.mutates if s not in made and s not in step.waiting}) > 1,
        "backward": any(n.phase == "backward" for n in nodes),
        "sum": any(n.takes for n in nodes),
        "exchange": any(n.collective for n in nodes),
    }
    assert set(has) == set(KINDS)
    return frozenset(kind for kind, there in has.items() if there)


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

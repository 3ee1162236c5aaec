"""From options to the chain that RK-Rotor solves, and from its sequence of steps to node executions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stowage.stages.formulations.fixed import fast_forward
from stowage.stages.formulations.rk_rotor import ChainBlock, ChainOption, ChainStep
from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule
from stowage.stages.ir.errors import IllegalPlanError, TableError
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.plan import Option
from stowage.stages.simulate.block import BlockCost, replay_block


@dataclass(frozen=True)
class Execution:
    """A node to run, and the step it belongs to.

    Attributes:
        node: which.
        label: of the step, for people.
        step: of the cycle F_0 … F_{L−1}, B_{L−1} … B_0, where each block runs once.
    """

    node: int
    label: str
    step: int = 0


def decode(actions: Iterable[int]) -> tuple[Action, ...]:
    """Inverse of the encoding in `Option`."""
    return tuple(Action("compute", a) if a >= 0 else Action("free", -1 - a) for a in actions)


def schedule_of(option: Option) -> BlockSchedule:
    """The block schedule of an option."""
    return BlockSchedule(decode(option.forward), decode(option.backward))


def without_output(graph: BlockGraph, schedule: BlockSchedule) -> tuple[BlockGraph, BlockSchedule]:
    """The same schedule when nobody needs the block's output any more: drop executions that served it alone.

    Once nodes are dropped too if they create nothing: they ran when the block ran first.
    """
    relaxed = replace(graph, output=())
    rows = [*schedule.forward, *schedule.backward]
    border = len(schedule.forward)
    wanted = set(graph.outgoing)
    kept: list[tuple[int, Action]] = []
    for number in range(len(rows) - 1, -1, -1):
        action = rows[number]
        if action.kind == "free":
            continue
        node = graph.nodes[action.index]
        forward = action.index < graph.forward_count
        if not forward or wanted.intersection(node.creates):
            kept.append((number, action))
            wanted.difference_update(node.creates)
            wanted.update(node.reads)
    kept.reverse()
    last: dict[int, int] = {}
    following: list[list[int]] = []
    alive: dict[int, int] = dict.fromkeys(graph.incoming, -1)
    for position, (_, action) in enumerate(kept):
        node = graph.nodes[action.index]
        for a in node.creates:
            if a in alive:
                following[max(last[a], 0)].append(a)
            alive[a], last[a] = position, position
        for a in node.reads:
            last[a] = position
        following.append([])
    for a in alive:
        if a not in graph.outgoing:
            following[last.get(a, len(kept) - 1)].append(a)
    parts: tuple[list[Action], list[Action]] = ([], [])
    for (number, action), dying in zip(kept, following):
        part = parts[0] if number < border else parts[1]
        part.append(action)
        part.extend(Action("free", a) for a in sorted(dying))
    return relaxed, BlockSchedule(tuple(parts[0]), tuple(parts[1]))


class Chain:
    """Blocks with their options."""

    def __init__(self, blocks: Sequence[Block], nodes: Sequence[ComputeNode], options: Sequence[Option]) -> None:
        self.blocks = blocks
        self.nodes = nodes
        self.options: dict[str, list[Option]] = {}
        for option in options:
            self.options.setdefault(option.block_hash, []).append(option)
        for block in blocks:
            if block.block_hash not in self.options:
                raise TableError(f"Block {block.block} ({block.block_hash}) has no options: run the options stage.")
        self._graphs = {b.block_hash: BlockGraph.from_json(b.graph) for b in blocks}
        self._tails: dict[tuple[str, int], BlockSchedule] = {}
        self._computed: dict[tuple[str, str, int, bool], tuple[int, ...]] = {}

    def graph(self, block: int) -> BlockGraph:
        """The block's graph."""
        return self._graphs[self.blocks[block].block_hash]

    @cached_property
    def chain_blocks(self) -> list[ChainBlock]:
        """What RK-Rotor solves."""
        distinct: dict[str, tuple[list[ChainOption], list[ChainOption], float, int]] = {}
        found: list[ChainBlock] = []
        for b, block in enumerate(self.blocks):
            graph = self.graph(b)
            if block.block_hash not in distinct:
                distinct[block.block_hash] = self._costs(block.block_hash, graph)
            options, tails, fast_time_s, fast_peak = distinct[block.block_hash]
            below = self.graph(b - 1) if b else None
            found.append(
                ChainBlock(
                    input_bytes=sum(below.allocations[a].nbytes for a in below.output) if below else 0,
                    gradient_bytes=sum(graph.allocations[a].nbytes for a in graph.incoming),
                    resident_bytes=block.resident_bytes,
                    options=options,
                    tail_options=tails,
                    fast_time_s=fast_time_s,
                    fast_peak_bytes=fast_peak,
                )
            )
        return found

    def _costs(self, block_hash: str, graph: BlockGraph) -> tuple[list[ChainOption], list[ChainOption], float, int]:
        def of(cost: BlockCost) -> ChainOption:
            return ChainOption(
                time_s=cost.forward_time_s + cost.backward_time_s,
                save_bytes=cost.save_bytes,
                forward_peak_bytes=cost.forward_peak_bytes,
                backward_peak_bytes=cost.backward_peak_bytes,
            )

        options: list[ChainOption] = []
        tails: list[ChainOption] = []
        for number, option in enumerate(self.options[block_hash]):
            schedule = schedule_of(option)
            options.append(of(replay_block(graph, schedule)))
            tails.append(self._tail_cost(block_hash, number, graph, schedule, of, options[-1]))
        pinned = any(n.once and n.creates for n in graph.nodes[: graph.forward_count])
        fast = replay_block(graph, fast_forward(graph), complete=False)
        return options, tails, math.inf if pinned else fast.forward_time_s, fast.forward_peak_bytes

    def _tail_cost(
        self, block_hash: str, number: int, graph: BlockGraph, schedule: BlockSchedule, of: object, whole: ChainOption
    ) -> ChainOption:
        relaxed, tail = without_output(_with_effects_done(graph), schedule)
        try:
            cost = replay_block(relaxed, tail)
        except IllegalPlanError:
            self._tails[block_hash, number] = schedule
            return whole
        self._tails[block_hash, number] = tail
        return of(cost)  # type: ignore[operator, no-any-return]

    def executions(self, steps: Iterable[ChainStep]) -> list[Execution]:
        """The node executions of a sequence, in order; shared nodes first, what waits for the last gradient at the end.
        Effects happen once."""
        assert self.chain_blocks
        found = [Execution(n.node, "shared") for n in self.nodes if n.block == SHARED and n.phase != "update"]
        late = [n.node for n in self.nodes if n.block == SHARED and n.phase == "update"]
        tail = [Execution(node, "updates", 2 * len(self.blocks) - 1) for node in late]
        done: set[int] = set()
        for step in steps:
            if step.kind == "drop":
                continue
            block = self.blocks[step.block]
            cycle = 2 * len(self.blocks) - 1 - step.block if step.kind == "backward" else step.block
            if step.kind == "fast":
                label = f"F{step.block} fast"
            else:
                label = f"{'F' if step.kind == 'forward' else 'B'}{step.block} option {step.option}"
            for position in self._positions(step):
                node = block.nodes[position]
                if self.nodes[node].once and node in done:
                    continue
                done.add(node)
                found.append(Execution(node, label, cycle))
        return found + tail

    def _positions(self, step: ChainStep) -> tuple[int, ...]:
        """Nodes of the block that a step runs, by position; the same for equal blocks."""
        block_hash = self.blocks[step.block].block_hash
        key = block_hash, step.kind, step.option, step.tail
        if key not in self._computed:
            if step.kind == "fast":
                actions = fast_forward(self.graph(step.block)).forward
            else:
                option = self.options[block_hash][step.option]
                schedule = self._tails[block_hash, step.option] if step.tail else schedule_of(option)
                actions = schedule.forward if step.kind == "forward" else schedule.backward
            self._computed[key] = tuple(a.index for a in actions if a.kind == "compute")
        return self._computed[key]


def _with_effects_done(graph: BlockGraph) -> BlockGraph:
    """The block on a second run: forward nodes that only have effects have had them, so they cost nothing."""
    return replace(
        graph,
        nodes=tuple(
            replace(n, time_s=0.0, workspace_bytes=0) if k < graph.forward_count and n.once and not n.creates else n
            for k, n in enumerate(graph.nodes)
        ),
    )

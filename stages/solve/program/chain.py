"""Makes the chain that RK-Rotor solves from options, and node executions from its sequence of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.formulations.block.fixed import fast_forward
from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption, ChainStep
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.encoding import schedule_of
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.plan import Option
from stowage.stages.simulate.block import replay_block
from stowage.stages.simulate.last_run import last_run_of


@dataclass(frozen=True)
class Execution:
    """A node to run, and the step it belongs to.

    Attributes:
        node: the node's number.
        label: name of the step, for people.
        step: number of the step in the cycle F_0 … F_{L−1}, B_{L−1} … B_0, where each block runs once.
    """

    node: int
    label: str
    step: int = 0


def once(options: Sequence[int]) -> list[ChainStep]:
    """Return the steps that run every block once, with the given options."""
    forward = [ChainStep("forward", b, o) for b, o in enumerate(options)]
    return forward + [ChainStep("backward", b, options[b]) for b in reversed(range(len(options)))]


class Chain:
    """The blocks with their options; runs sequences of steps."""

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
        self._computed: dict[tuple[str, str, int, bool], tuple[int, ...]] = {}
        self._expanded: dict[ChainStep, tuple[list[Execution], set[int]]] = {}

    def graph(self, block: int) -> BlockGraph:
        """Return the block's graph."""
        return self._graphs[self.blocks[block].block_hash]

    @cached_property
    def chain_blocks(self) -> list[ChainBlock]:
        """Return the blocks as RK-Rotor sees them."""
        distinct: dict[str, tuple[list[ChainOption], list[ChainOption], float, int]] = {}
        found: list[ChainBlock] = []
        for b, block in enumerate(self.blocks):
            graph = self.graph(b)
            if block.block_hash not in distinct:
                distinct[block.block_hash] = self._costs(block.block_hash, graph)
            options, last_runs, fast_time_s, fast_peak = distinct[block.block_hash]
            lower_tier = self.graph(b - 1) if b else None
            found.append(
                ChainBlock(
                    input_bytes=sum(lower_tier.allocations[a].nbytes for a in lower_tier.output) if lower_tier else 0,
                    gradient_bytes=sum(graph.allocations[a].nbytes for a in graph.incoming),
                    resident_bytes=block.resident_bytes,
                    options=options,
                    last_run_options=last_runs,
                    fast_time_s=fast_time_s,
                    fast_peak_bytes=fast_peak,
                )
            )
        return found

    @cached_property
    def fastest_options(self) -> list[int]:
        """Return the fastest option of each block; of equal ones the one that keeps least for backward."""
        return [b.fastest for b in self.chain_blocks]

    @cached_property
    def leanest_options(self) -> list[int]:
        """Return the option of each block that keeps least for backward; of equal ones the fastest."""
        return [b.leanest for b in self.chain_blocks]

    def options_of(self, chosen: Iterable[tuple[int, int]]) -> list[Option]:
        """Return the options that pairs of a block and a number name."""
        return [self.options[self.blocks[block].block_hash][option] for block, option in sorted(chosen)]

    def _costs(self, block_hash: str, graph: BlockGraph) -> tuple[list[ChainOption], list[ChainOption], float, int]:
        options = [
            ChainOption(o.forward_time_s + o.backward_time_s, o.save_bytes, o.forward_peak_bytes, o.backward_peak_bytes)
            for o in self.options[block_hash]
        ]
        last_runs = [
            ChainOption(
                o.last_run_time_s, o.last_run_save_bytes, o.last_run_forward_peak_bytes, o.last_run_backward_peak_bytes
            )
            for o in self.options[block_hash]
        ]
        pinned = any(n.once and n.creates for n in graph.nodes[: graph.forward_count])
        fast = replay_block(graph, fast_forward(graph), complete=False)
        return options, last_runs, math.inf if pinned else fast.forward_time_s, fast.forward_peak_bytes

    def executions(self, steps: Iterable[ChainStep]) -> list[Execution]:
        """Return the node executions of a sequence, in order.

        Shared nodes are first, what waits for the last gradient is at the end. Effects happen once.
        """
        found = [Execution(n.node, "shared") for n in self.nodes if n.block == SHARED and n.phase != "update"]
        late = [n.node for n in self.nodes if n.block == SHARED and n.phase == "update"]
        updates = [Execution(node, "updates", 2 * len(self.blocks) - 1) for node in late]
        done: set[int] = set()
        for step in steps:
            if step.kind == "drop":
                continue
            runs, once = self._runs(step)
            if once.isdisjoint(done):
                found += runs
            else:
                found += [run for run in runs if run.node not in once or run.node not in done]
            done |= once
        return found + updates

    def _runs(self, step: ChainStep) -> tuple[list[Execution], set[int]]:
        """Return the executions of a step, and their nodes that may run once in all."""
        if step not in self._expanded:
            block = self.blocks[step.block]
            cycle = 2 * len(self.blocks) - 1 - step.block if step.kind == "backward" else step.block
            if step.kind == "fast":
                label = f"F{step.block} fast"
            else:
                label = f"{'F' if step.kind == 'forward' else 'B'}{step.block} option {step.option}"
            nodes = [block.nodes[position] for position in self._positions(step)]
            runs = [Execution(node, label, cycle) for node in nodes]
            self._expanded[step] = runs, {node for node in nodes if self.nodes[node].once}
        return self._expanded[step]

    def _positions(self, step: ChainStep) -> tuple[int, ...]:
        """Return the nodes of the block that a step runs, by position; the same for equal blocks."""
        block_hash = self.blocks[step.block].block_hash
        key = block_hash, step.kind, step.option, step.last_run
        if key not in self._computed:
            if step.kind == "fast":
                actions = fast_forward(self.graph(step.block)).forward
            else:
                option = self.options[block_hash][step.option]
                schedule = last_run_of(option, self.graph(step.block)) if step.last_run else schedule_of(option)
                actions = schedule.forward if step.kind == "forward" else schedule.backward
            self._computed[key] = tuple(a.index for a in actions if a.kind == "compute")
        return self._computed[key]

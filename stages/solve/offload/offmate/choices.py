"""Lists the ways to run a block that O-ILP chooses among: schedules, and activations that are offloaded meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.block import BlockGraph, BlockSchedule
from stowage.stages.ir.encoding import schedule_of
from stowage.stages.solve.offload.offloader import Offloader

OPTIONS_PER_BLOCK = 6
"""Schedules of a block that O-ILP chooses among, before activations are offloaded."""


@dataclass(frozen=True)
class Choice:
    """One way to run a block.

    It is an option, and storages that are offloaded between its forward and its backward: to the host, or on to the
    disk behind it.
    """

    option: int
    offloaded: tuple[int, ...] = ()
    to_disk: bool = False


def choices_of(offloader: Offloader, *, preprint: bool = False) -> list[list[Choice]]:
    """Return the choices of each block; with `preprint` the three that the OffMate preprint gives it."""
    found = _Choices(offloader)
    return [found.three(b) if preprint else found.several(b) for b in range(len(offloader.chain.blocks))]


class _Choices:
    """Makes the choices of one block after the other."""

    def __init__(self, offloader: Offloader) -> None:
        self.chain = offloader.chain
        self.lower_tier = offloader.lower_tier
        self.sizes = offloader.program.nbytes

    def three(self, block: int) -> list[Choice]:
        """Return three choices for a block.

        They are the fastest schedule; the one that saves least; and one of cheap recomputation with everything else
        offloaded.
        """
        costs = self.chain.chain_blocks[block].options
        rate = self.lower_tier.link.duplex_bytes_per_s
        fastest, leanest = self.chain.fastest_options[block], self.chain.leanest_options[block]
        cheap = min(range(len(costs)), key=lambda o: costs[o].time_s + 2 * costs[o].save_bytes / rate)
        offloaded = Choice(cheap, tuple(self._saved(block, cheap)))
        return list(dict.fromkeys([Choice(fastest), Choice(leanest), offloaded]))

    def several(self, block: int) -> list[Choice]:
        options = self.chain.options[self.chain.blocks[block].block_hash]
        costs = self.chain.chain_blocks[block].options
        key = [(o.time_s, o.save_bytes, max(o.forward_peak_bytes, o.backward_peak_bytes)) for o in costs]
        front = [
            o
            for o in range(len(options))
            if not any(
                all(x <= y for x, y in zip(key[p], key[o])) and (key[p] != key[o] or p < o) for p in range(len(options))
            )
        ]
        front.sort(key=lambda o: key[o])
        if len(front) > OPTIONS_PER_BLOCK:
            last = len(front) - 1
            picks = {round(i * last / (OPTIONS_PER_BLOCK - 1)) for i in range(OPTIONS_PER_BLOCK)}
            picks |= {min(range(len(front)), key=lambda i: key[front[i]][k]) for k in (1, 2)}
            front = [front[i] for i in sorted(picks)]
        found: list[Choice] = []
        for option in front:
            movable = self._saved(block, option)
            half: list[int] = []
            total = sum(self.sizes[s] for s in movable)
            for storage in movable:
                if sum(self.sizes[s] for s in half) >= total / 2:
                    break
                half.append(storage)
            for subset in dict.fromkeys([(), tuple(half), tuple(movable)]):
                found.append(Choice(option, subset))
                if subset and self.lower_tier.disk is not None:
                    found.append(Choice(option, subset, to_disk=True))
        return found

    def _saved(self, block: int, option: int) -> list[int]:
        """Return the storages that an option keeps for backward and that may be offloaded meanwhile, large ones first.

        The block's input is among them.
        """
        if block == len(self.chain.blocks) - 1 or not self.lower_tier.activations:
            return []  # its backward follows at once
        described = self.chain.blocks[block]
        graph = self.chain.graph(block)
        schedule = schedule_of(self.chain.options[described.block_hash][option])
        found = {described.storages[a] for a in kept_for_backward(graph, schedule)}
        if block:
            before = self.chain.blocks[block - 1]
            found.update(before.storages[a] for a in self.chain.graph(block - 1).output)
        sizes = self.sizes
        large = [s for s in found if sizes[s] >= self.lower_tier.smallest_bytes]
        return sorted(large, key=lambda s: (-sizes[s], s))


def kept_for_backward(graph: BlockGraph, schedule: BlockSchedule) -> set[int]:
    """Return the allocations in memory between forward and backward, without the output.

    The next block still reads the output.
    """
    kept: set[int] = set()
    for action in schedule.forward:
        if action.kind == "free":
            kept.discard(action.index)
        else:
            kept.update(graph.nodes[action.index].creates)
    return kept - set(graph.output)

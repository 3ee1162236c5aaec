"""Times an update by the CPU of a parameter that is offloaded."""

from __future__ import annotations

import math

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.updates import can_move
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.program import StepProgram


class UpdatesOnCpu:
    """Knows how long updates of one program take the CPU.

    Attributes:
        clipping: norms of gradients, and the scale that clips all of them, without which no update can start.
    """

    def __init__(self, program: StepProgram, tier: LowerTier) -> None:
        self._program = program
        self._tier = tier
        self.clipping = frozenset(
            s for n in program.nodes if n.phase == "update" and not n.collective for s in n.creates
        )

    def seconds(self, node: ComputeNode) -> float:
        """Return the seconds of an update node; infinite where the CPU cannot do it.

        It reads gradient, weight and states, and writes the last two; a gradient that is clipped is read and written
        once more before.
        """
        program = self._program
        if not self._tier.cpu_update_bytes_per_s or not program.pinned.isdisjoint(node.mutates):
            return math.inf
        if not all(can_move(program.storages[s].name) for s in node.mutates):
            return math.inf  # it keeps something on the device
        sizes = program.nbytes
        written = sum(sizes[s] for s in node.mutates)
        read = sum(sizes[s] for s in node.reads if s not in node.mutates)
        clipped = 2 * read if self.clipping.intersection(node.reads) else 0
        return (2 * written + read + clipped) / self._tier.cpu_update_bytes_per_s

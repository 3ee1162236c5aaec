"""Offloads everything by a fixed policy: each step's parameters and states are reloaded before it, and then dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.solve.offload.insertion import StepTransfers
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.proposal import Decision, Proposals, Task

AHEAD_AND_LAG = ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2))
"""Steps by which reloads precede their use, and by which storages stay after it: more and more look-ahead."""


@dataclass(frozen=True)
class Streaming:
    """Proposes plans that offload everything, with the fastest and the leanest options."""

    offloader: Offloader

    def propose(self, task: Task) -> Proposals:
        """Propose more and more look-ahead."""
        chain = self.offloader.chain
        for options in (chain.fastest_options, chain.leanest_options):
            yield from self._of(self.offloader.executions(options))

    def _of(self, executions: Sequence[Execution]) -> Proposals:
        needs = self.offloader.needs(executions)
        for ahead, lag in AHEAD_AND_LAG:
            if ahead + lag >= len(needs):
                return
            transfers, lower_tier = stream_everything(needs, ahead=ahead, lag=lag)
            yield self.offloader.proposal(
                f"stream_{ahead}_{lag}", executions, transfers, lower_tier, Decision("streaming")
            )


def stream_everything(
    needs: Sequence[frozenset[int]], *, ahead: int, lag: int
) -> tuple[list[StepTransfers], frozenset[int]]:
    """Return the transfers of each step, and what is offloaded when an iteration starts.

    Args:
        needs: for each step the movable storages that it uses.
        ahead: steps by which a reload precedes its use; 0 for none.
        lag: steps that a storage stays after its use, so that it can be offloaded meanwhile.
    """
    count = len(needs)
    present = [frozenset[int]().union(*(needs[(t - k) % count] for k in range(-ahead, lag + 1))) for t in range(count)]
    transfers = [
        StepTransfers(
            free=tuple(sorted(present[t - 1] - present[t])),
            reload=tuple(sorted(present[t] - present[t - 1])),
            offload=tuple(sorted(needs[t])),
        )
        for t in range(count)
    ]
    everything = frozenset[int]().union(*needs)
    return transfers, everything - present[-1]

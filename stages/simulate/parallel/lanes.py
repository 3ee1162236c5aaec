"""Times the lanes of a rank: computing, collectives, and the two directions of the link to the host.

A group is used twice in a step, in forward and in backward. Before a use its shards may have to be copied to the device
and gathered; after a use in backward its gradients may have to be reduced, and copied to the host. Each lane does one
thing at a time, in the order in which it is asked:

    gather(0) … gather(ahead−1), then for each use i: gather(i+ahead), compute(i), reduce(i), offload(i)

A gather that is asked for ahead starts while earlier uses compute, not before use i−1 has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """One use of a group: how long each lane is busy with it.

    Attributes:
        compute_s: computing.
        reload_s: copying its shards to the device, before gathering.
        gather_s: gathering its weights, before computing.
        reduce_s: reducing and scattering its gradients, after computing.
        offload_s: copying its gradients to the host, after reducing.
    """

    compute_s: float
    reload_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    offload_s: float = 0.0


@dataclass(frozen=True)
class LaneRules:
    """What overlaps with what.

    Attributes:
        ahead: uses ahead whose weights are being gathered while one computes; 0: nothing overlaps with a gather.
        reduce_waits: the next use waits for the reduction.
        offload_waits: the next use waits for the offload of gradients.
        shared_link: collectives and copies use one link, one after the other.
        slowdown: by which share of its collectives' time a use computes longer.
    """

    ahead: int = 1
    reduce_waits: bool = False
    offload_waits: bool = False
    shared_link: bool = False
    slowdown: float = 0.0


class Lanes:
    """Holds the moment at which each lane is free."""

    def __init__(self, rules: LaneRules) -> None:
        self._rules = rules
        self.computed = 0.0
        self._reload = self._collective = self._offload = 0.0

    @property
    def end_s(self) -> float:
        """Return the moment at which all lanes are free."""
        return max(self.computed, self._reload, self._collective, self._offload)

    def run(self, uses: Sequence[Use]) -> None:
        """Run one phase; none of its gathers starts before what is computed so far has ended."""
        ahead = self._rules.ahead
        begin = self.computed
        ready = [self._gather(use, begin) for use in uses[:ahead]]
        for i, use in enumerate(uses):
            if i + ahead < len(uses):
                ready.append(self._gather(uses[i + ahead], self.computed))
            slower_s = self._rules.slowdown * (use.gather_s + use.reduce_s)
            self.computed = max(self.computed, ready[i]) + use.compute_s + slower_s
            reduced = self._on_collective(self.computed, use.reduce_s)
            if self._rules.reduce_waits:
                self.computed = max(self.computed, reduced)
            if use.offload_s:
                sent = self._on_offload(reduced, use.offload_s)
                if self._rules.offload_waits:
                    self.computed = max(self.computed, sent)

    def wait(self) -> None:
        """Let computing go on only when all lanes are free."""
        self.computed = self.end_s

    def _gather(self, use: Use, begin: float) -> float:
        if use.reload_s:
            start = max(begin, self._reload, self._collective if self._rules.shared_link else 0.0)
            begin = self._reload = start + use.reload_s
            if self._rules.shared_link:
                self._collective = max(self._collective, self._reload)
        return self._on_collective(begin, use.gather_s)

    def _on_collective(self, begin: float, seconds: float) -> float:
        if not seconds:
            return begin
        self._collective = max(begin, self._collective) + seconds
        return self._collective

    def _on_offload(self, begin: float, seconds: float) -> float:
        start = max(begin, self._offload, self._collective if self._rules.shared_link else 0.0)
        self._offload = start + seconds
        if self._rules.shared_link:
            self._collective = max(self._collective, self._offload)
        return self._offload

"""An H-Graph as the chain of blocks that RK-Rotor plans (thesis 2.5, 3.2.2).

Block k is forward node k, and the backward nodes that belong to it.

A cluster's options are the block's; any other node has one, which keeps what its backward reads. What only the next
node reads in forward is the link to it (x_{k+1}). A value that is read farther on, in forward or backward, or that must
not be made again, counts as resident from its making to its last use.

`rk_rotor.py` adds g_t and G_t to sub-problems that end with block t. Backward nodes run once and in order, so all
gradients in memory when block t begins its backward are known: they are counted as G_t, and g_t is 0. Resident values
that are needed from then on are counted in G_t too.

The counts are good enough to compare plans; the memory of a plan follows from its executions (`staged_order.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption
from stowage.stages.formulations.cluster.lazy import repeatable
from stowage.stages.formulations.cluster.problem import ClusterWay, HProblem


@dataclass(frozen=True)
class HChain:
    """The chain of an H-Graph for RK-Rotor.

    Attributes:
        data: the H-Graph.
        owner: the block that each backward node belongs to; never rises.
    """

    data: HProblem
    owner: dict[int, int]

    @staticmethod
    def of(data: HProblem) -> HChain | None:
        """Make the chain, or None where clusters do not run backward in the opposite order of forward."""
        loss, above = data.graph.loss, data.graph.loss - 1
        owner: dict[int, int] = {}
        behind = [data.graph.clusters[data.backward_of[b]].forward for b in sorted(data.backward_of)]
        if loss == 0 or behind != sorted(behind, reverse=True):
            return None
        for b in range(loss + 1, data.size):
            if b in data.backward_of:
                above = behind.pop(0)
            else:
                # It belongs to the last operation that reads or made its inputs. `options/clusters/owners.py` groups a
                # block's nodes by that rule; here groups are given, and an owner must lie between those around it.
                uses = {k for d in _reads(data, b) for k in (*data.contributors[d], *data.readers[d]) if k <= above}
                above = max(max(uses, default=above), behind[0] if behind else 0)
            owner[b] = above
        return HChain(data, owner)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Return, for each block, the backward node before which its last executions come."""
        size = self.data.size
        return tuple(min((b for b, o in self.owner.items() if o <= k), default=size) for k in range(self._loss))

    @cached_property
    def crossing_bytes(self) -> int:
        """Return the bytes of the values that are read in forward beyond the next node."""
        far = (d for d in self._values if any(self._maker(d) + 1 < r < self._loss for r in self.data.readers[d]))
        return sum(self.data.nbytes[d] for d in far)

    def runs_again(self, k: int) -> bool:
        """Say whether a forward node may run again by itself: not where others add to what it makes."""
        data = self.data
        return repeatable(data, k) and all(len(data.contributors[d]) == 1 for d in data.graph.nodes[k].makes)

    def blocks(self) -> list[ChainBlock]:
        """Make the blocks of the chain."""
        return [self._block(k) for k in range(self._loss)]

    @property
    def _loss(self) -> int:
        return self.data.graph.loss

    @cached_property
    def _values(self) -> list[int]:
        """Return the values that forward makes."""
        return [d for d, makers in enumerate(self.data.contributors) if makers[0] < self._loss]

    def _maker(self, value: int) -> int:
        return self.data.contributors[value][0]

    @cached_property
    def _resident(self) -> frozenset[int]:
        """Return the values of forward that are no link and are not kept by their own block alone."""
        return frozenset(d for d in self._values if self._stays(d))

    def _stays(self, value: int) -> bool:
        data, k, loss = self.data, self._maker(value), self._loss
        if value in data.graph.final or (not self.runs_again(k) and k not in data.forward_of):
            return True
        near = {k, k + 1} if k + 1 in data.readers[value] else {k}
        return any(r != k + 1 if r <= loss else self.owner[r] not in near for r in data.readers[value])

    def _resident_bytes(self, t: int) -> int:
        """Return bytes of resident values needed once block t begins its backward; for the last block, at the loss."""
        data = self.data
        begin = self._loss if t == self._loss - 1 else self.begins[t]

        def needed(d: int) -> bool:
            return d in data.graph.final or any(r >= begin or (r <= t and self.runs_again(r)) for r in data.readers[d])

        return sum(data.nbytes[d] for d in self._resident if needed(d))

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """Return the first and last node of each value made from the loss on, and its bytes."""
        data, found = self.data, []
        for d, makers in enumerate(data.contributors):
            if makers[0] >= self._loss:
                end = data.size if d in data.graph.final else max((makers[-1], *data.readers[d]))
                found.append((makers[0], end, data.nbytes[d]))
        return found

    def _gradient_bytes(self, b: int) -> int:
        """Return the bytes of gradients in memory when backward node b begins."""
        return sum(nbytes for start, end, nbytes in self._spans if start < b <= end)

    def _block(self, k: int) -> ChainBlock:
        data, last = self.data, k == self._loss - 1
        below = [d for d in self._own(k - 1) if k in data.readers[d]] if k else []
        plain = next((way for way in data.ways[k] if way.option is None), None)
        if plain is not None and self.runs_again(k):
            fast_time_s, fast_peak_bytes = plain.time_s, self._highest(k, plain)
        else:
            fast_time_s, fast_peak_bytes = 0.0 if k not in data.forward_of else math.inf, 0
        ways = [way for way in data.ways[k] if way.option is not None] if k in data.forward_of else data.ways[k]
        options = [self._options(k, way) for way in ways]
        return ChainBlock(
            input_bytes=sum(data.nbytes[d] for d in below),
            gradient_bytes=0,
            resident_bytes=self._resident_bytes(k) + (0 if last else self._gradient_bytes(self.begins[k])),
            options=tuple(option for option, _ in options),
            last_run_options=tuple(last for _, last in options),
            fast_time_s=fast_time_s,
            fast_peak_bytes=fast_peak_bytes,
        )

    def _own(self, k: int) -> list[int]:
        """Return the values of forward node k that are not resident."""
        return [d for d in self.data.graph.nodes[k].makes if d not in self._resident]

    def _highest(self, k: int, way: ClusterWay) -> int:
        """Return the most bytes while a forward node runs, without its inputs."""
        own = self._own(k)
        return max(s.internal_bytes + sum(self.data.nbytes[d] for d in own if d not in s.unborn) for s in way.steps)

    def _options(self, k: int, way: ClusterWay) -> tuple[ChainOption, ChainOption]:
        """Make the option of block k for a way, and its last-run option, when the next block needs nothing of it."""
        data, own = self.data, self._own(k)
        backward = [(b, self._backward_way(b, way)) for b, o in self.owner.items() if o == k]
        read = {d for _, other in backward for d in other.reads}
        kept = sum(data.nbytes[d] for d in own if d in read)
        linked = sum(data.nbytes[d] for d in own if d not in read and k + 1 in data.readers[d])
        forward_peak, backward_peak = self._highest(k, way), self._highest_backward(k, way, backward, kept, linked)
        time_s = sum(other.time_s for _, other in backward)
        cluster = k in data.forward_of
        again = way.time_s if cluster or self.runs_again(k) else 0.0
        option = ChainOption(time_s + again, way.phantom_bytes + kept + linked, forward_peak, backward_peak)
        if not cluster and not kept:
            return option, ChainOption(time_s, 0, 0, backward_peak)
        return option, ChainOption(time_s + again, way.phantom_bytes + kept, forward_peak, backward_peak)

    def _backward_way(self, b: int, way: ClusterWay) -> ClusterWay:
        wanted = way.option if b in self.data.backward_of else None
        return next(other for other in self.data.ways[b] if other.option == wanted)

    def _highest_backward(
        self, k: int, way: ClusterWay, backward: list[tuple[int, ClusterWay]], kept: int, linked: int
    ) -> int:
        """Return the most bytes while the backward nodes of block k run, above what `_block` counts as resident.

        In the last block the loss counts too.
        """
        data, highest, phantom = self.data, 0, way.phantom_bytes
        last = k == self._loss - 1
        loss = [(self._loss, other) for other in data.ways[self._loss]] if last else []
        for b, other in (*loss, *backward):
            if b in data.backward_of:
                phantom = 0
            made = {d: data.nbytes[d] for d in data.graph.nodes[b].makes if data.contributors[d][0] == b}
            for step in other.steps:
                now = (
                    step.internal_bytes + phantom + kept + self._gradient_bytes(b) + (linked if b == self._loss else 0)
                )
                highest = max(highest, now + sum(n for d, n in made.items() if d not in step.unborn))
        return max(0, highest - (0 if last else self._gradient_bytes(self.begins[k])))


def _reads(data: HProblem, b: int) -> set[int]:
    """Return the values of forward that a backward node reads."""
    read = {d for way in data.ways[b] for d in way.reads}
    return {d for d in read if data.contributors[d][0] < data.graph.loss}

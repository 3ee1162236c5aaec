"""Talks to the other ranks of a run outside of steps: measures rates, hands out objects, compares them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Found = TypeVar("Found")

PROBE_BYTES = 4 << 20
PROBES = 5


@dataclass(frozen=True)
class Rates:
    """What collectives take among the ranks of a group.

    Attributes:
        bytes_per_s: bytes that a rank receives per second in a gather.
        start_s: time of a gather of next to no bytes.
    """

    bytes_per_s: float
    start_s: float


class Collective:
    """A collective under way."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait until what it writes can be read: on a GPU, by what is queued from now on."""
        for work in self._works:
            work.wait()


class Ranks:
    """The processes that train one model together.

    Attributes:
        group: the process group.
        count: number of ranks.
        rank: this process's own.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._first = self._global(0)
        self._rates: Rates | None = None

    def from_first(self, make: Callable[[], Found]) -> Found:
        """Return what rank 0 makes, on all ranks; an error that it raises is raised on all."""
        content: list[Any] = [None]
        if self.rank == 0:
            try:
                content = [(True, make())]
            except Exception as error:
                content = [(False, (type(error), error.args, vars(error)))]
        dist.broadcast_object_list(content, src=self._first, group=self.group)
        made, found = content[0]
        if not made:
            kind, arguments, attributes = found
            raised = kind.__new__(kind, *arguments)  # its own constructor may want other arguments
            raised.args = arguments
            vars(raised).update(attributes)
            raise raised
        result: Found = found
        return result

    def all(self, own: Found) -> list[Found]:
        """Return what all ranks give, in their order."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, own, group=self.group)
        return found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor by rank 0's."""
        dist.broadcast(tensor, src=self._first, group=self.group)

    def gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Collective:
        """Start filling a flat tensor with the flat shards of all ranks, in their order."""
        if whole.device.type != "cpu":
            start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return Collective([start(whole, shard, group=self.group, async_op=True)])
        # Gloo's own gather copies what it receives once more; broadcasts write to where it belongs.
        parts = whole.chunk(self.count)
        parts[self.rank].copy_(shard)
        return Collective([dist.broadcast(p, self._global(r), self.group, async_op=True) for r, p in enumerate(parts)])

    def reduce(self, whole: torch.Tensor) -> Collective:
        """Start the sum of a flat tensor over all ranks; each rank's own part of it is valid afterwards, no other."""
        parts = list(whole.chunk(self.count))
        if whole.device.type != "cpu":
            start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return Collective([start(parts[self.rank], whole, group=self.group, async_op=True)])
        work = (dist.reduce(p, self._global(r), group=self.group, async_op=True) for r, p in enumerate(parts))
        return Collective(list(work))

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank

    def rates(self, device: torch.device) -> Rates:
        """Return what collectives take, measured once: the same numbers on all ranks."""
        if self._rates is None:
            small = self._time_s(device, 64)
            large = self._time_s(device, PROBE_BYTES)
            moved = PROBE_BYTES * (self.count - 1)
            own = Rates(moved / max(large - small, 1e-9), small)
            self._rates = self.from_first(lambda: own)
        return self._rates

    def _time_s(self, device: torch.device, nbytes: int) -> float:
        shard = torch.zeros(nbytes // 4, device=device)
        whole = torch.empty(self.count * shard.numel(), device=device)
        times = []
        for _ in range(PROBES):
            dist.barrier(self.group)
            began = time.perf_counter()
            self.gather(whole, shard).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

"""Lends whole weights of a sharded model to a plain forward, module by module, on all ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from stowage.stages.runtime.offload.offloaded_tensor import OffloadedTensor, arrive, leave
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.sharding.plain_forward import say_read
from stowage.stages.runtime.sharding.sharding import DEALT_OUT, Sharding


class ShardedWeights:
    """The weights of which each rank has a shard; see `Lender`."""

    def __init__(self, sharding: Sharding, offloading: Callable[[], Offloading | None]) -> None:
        self._sharding = sharding
        self._offloading = offloading

    def settle_all(self) -> None:
        """Wait for all copies to and from the lower tier."""
        offloading = self._offloading()
        if offloading is not None:
            with self._sharding.inside():
                offloading.settle_all()

    def keep_to_limit(self) -> None:
        """Keep to the limit of memory, where there is one."""
        offloading = self._offloading()
        if offloading is not None:
            offloading.keep_to_limit()

    def offloaded_parameters(self) -> dict[str, torch.Tensor]:
        """Return what stands for parameters of which there are shards, by name."""
        cut = self._sharding.forms if self._sharding.sharded else {}
        return {n: p for n, p in self._sharding.parameters().items() if n in cut}

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Allow calls of modules inside: the caller gathers what they read (`peek`)."""
        self.settle_all()
        lent, offloading = self.offloaded_parameters(), self._offloading()
        for parameter in lent.values():
            arrive(parameter)
        try:
            with offloading.lending() if offloading is not None else nullcontext():
                yield
        finally:
            for name, parameter in lent.items():
                leave(parameter, name, DEALT_OUT)

    def like(self, name: str) -> torch.Tensor:
        """Return the layout of a whole parameter, as a tensor on the meta device."""
        return self._sharding.whole_layout(name)

    def peek(self, name: str) -> torch.Tensor:
        """Return a whole parameter in new memory; all ranks ask for the same ones, see `plain_forward`."""
        say_read(self._sharding.ranks, name)
        shard = self._sharding.shards()[name]
        if isinstance(shard, OffloadedTensor):
            offloading = self._offloading()
            assert offloading is not None
            shard = offloading.peek(name)
        return self._sharding.whole(name, shard.detach())

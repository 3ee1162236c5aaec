"""The verbs of a generated step that is sharded: gathers of weights and scatters of gradients, beside all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.runtime.clipping import scale_of
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.offload.transfers import noted_release
from stowage.stages.runtime.sharding.ranks import Collective
from stowage.stages.runtime.sharding.sharding import Gather, Sharding, release


class ShardedIteration(SingleIteration):
    """The surroundings of one run of a sharded step; see `Iteration`."""

    def __init__(self, *, sharding: Sharding, trains: bool = True, **surroundings: Any) -> None:
        super().__init__(**surroundings)
        self._sharding = sharding
        self.gradient = sharding.gradients
        self._gathers: dict[str, Gather] = {}
        self._scatters: dict[str, tuple[torch.Tensor, Collective]] = {}
        # As DistributedDataParallel does before a forward, but for those that follow one without synchronization.
        for name, buffer in self.buffer.items() if trains and not sharding.gradients else ():
            sharding.ranks.broadcast(buffer, f"buffer '{name}' of rank 0")

    def gather(self, key: str, names: Sequence[str]) -> None:
        """Start the gather of some parameters."""
        with self._outside.again():
            self._gathers[key] = self._sharding.start(names, [self.parameter[name].detach() for name in names])

    def gathered(self, key: str) -> Sequence[torch.Tensor]:
        """Wait for a gather, and return the whole weights."""
        with self._outside.again(), self._span("wait", f"gather of {key}"):
            gather: Gather = self._under_way(self._gathers, key)
            return gather.finish()

    def scatter(self, name: str, gradient: torch.Tensor) -> None:
        """Start averaging a parameter's gradient over all ranks."""
        form, like, ranks = self._sharding.forms[name], self._sharding.whole_layout(name), self._sharding.ranks
        with self._outside.again(), torch.no_grad():
            buffer = gradient.new_empty(form.padded_elements)
            buffer[form.elements :].zero_()
            # Divided before it is added, as DistributedDataParallel does.
            torch.mul(gradient, 1.0 / ranks.count, out=buffer.as_strided(like.shape, like.stride()))
            if self._sharding.gradients.pop(name, None) is not None:
                with noted_release(gradient):  # the step refers to it no more
                    pass
            self._scatters[name] = buffer, ranks.reduce(buffer, f"the scatter of the gradient of '{name}'")

    def scattered(self, name: str) -> torch.Tensor:
        """Wait for a scatter, and return this rank's shard of the mean."""
        form = self._sharding.forms[name]
        with self._outside.again(), self._span("wait", f"scatter of {name}"):
            buffer, work = self._under_way(self._scatters, name)
            work.wait()
            shard: torch.Tensor = buffer.chunk(self._sharding.ranks.count)[self._sharding.ranks.rank].clone()
            release(buffer)
        return shard.as_strided(form.shape, form.stride)

    def clip(self, norms: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Return the factor that clips gradients by their global norm over all ranks, and remember the norm."""
        with self._outside.again():
            own = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), 2.0)
            total = own.square()
            self._sharding.ranks.add(total, "the global norm of the gradients")
            self.grad_norm = total.sqrt()
        return scale_of(self.grad_norm, max_norm)

    def keep(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Keep this rank's own gradient, whole, until the last micro-batch of the update."""
        self._sharding.gradients[name] = gradient

    def keep_offloaded(self, name: str) -> None:
        """Refuse: gradients that wait are whole, and stay on the device.

        Raises:
            PlanMismatchError: the plan offloads them.
        """
        raise PlanMismatchError(f"The plan offloads the waiting gradient of '{name}', which no sharded step does.")

    @staticmethod
    def _under_way(found: dict[str, Any], key: str) -> Any:
        if key not in found:
            raise PlanMismatchError(f"The plan waits for a collective of '{key}' that it has not started.")
        return found.pop(key)

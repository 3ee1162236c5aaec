"""The verbs of a generated step that is sharded: gathers of weights and scatters of gradients, beside all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stowage.stages.device.events import noted_release
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.runtime.clipping import scale_of
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.sharding.sharding import Scatter, Sharding


class ShardedIteration(SingleIteration):
    """The surroundings of one run of a sharded step; see `Iteration`."""

    def __init__(self, *, sharding: Sharding, **surroundings: Any) -> None:
        super().__init__(**surroundings)
        self._sharding = sharding
        self.gradient = sharding.gradients
        self._under_way = sharding.under_way
        self._under_way.clear()

    def gather(self, key: str, names: Sequence[str]) -> None:
        """Start the gather of some parameters."""
        with self._outside.again():
            self._under_way.add(
                f"gather of '{key}'",
                lambda: self._sharding.start(names, [self.parameter[name].detach() for name in names]),
            )

    def gathered(self, key: str) -> Sequence[torch.Tensor]:
        """Wait for a gather, and return the whole weights."""
        with self._outside.again(), self._span("wait", f"gather of {key}"):
            return self._under_way.pop(f"gather of '{key}'").finish()

    def scatter(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Start averaging the gradients of some parameters over all ranks."""
        with self._outside.again(), torch.no_grad():
            name = f"scatter of '{next(iter(gradients))}'"
            self._under_way.add(name, lambda: Scatter(self._sharding, gradients))
            for name, gradient in gradients.items():
                if self._sharding.gradients.pop(name, None) is not None:
                    with noted_release(gradient):  # the step refers to it no more
                        pass

    def scattered(self, key: str) -> Sequence[torch.Tensor]:
        """Wait for the scatter whose first parameter is `key`, and return this rank's shards of the means."""
        with self._outside.again(), self._span("wait", f"scatter of {key}"):
            return self._under_way.pop(f"scatter of '{key}'").finish()

    def clip(self, norms: Sequence[torch.Tensor | None], max_norm: float) -> torch.Tensor:
        """Return the factor that clips gradients by their global norm over all ranks, and remember the norm."""
        there = [norm for norm in norms if norm is not None]
        if not there:  # nothing trains in this step, on any rank
            return super().clip(norms, max_norm)
        with self._outside.again():
            own = torch.stack([n.to(there[0].device) for n in there])
            wide = torch.promote_types(own.dtype, torch.float32)  # squares of large norms have no place in 16 bits
            total = torch.linalg.vector_norm(own, 2.0, dtype=wide).square()
            self._sharding.ranks.add(total, "the global norm of the gradients")
            self.grad_norm = total.sqrt().to(own.dtype)
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

"""Tells how much a gradient varies from batch to batch, by a sample of its elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

SAMPLED = 4096
"""About so many elements of a gradient are looked at, evenly spaced: sums over all would take its memory again and
again, once for each class and kind."""


@dataclass
class Spread:
    """The sums over batches of some elements of each parameter's gradient, and of their squares."""

    batches: int = 0
    _sums: dict[str, tuple[float, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add the gradient of one batch, which has the same parameters as those before."""
        self.batches += 1
        stride = max(1, sum(g.numel() for g in gradients.values()) // SAMPLED)
        for name, gradient in gradients.items():
            taken = gradient.detach().reshape(-1)[::stride]
            weight = gradient.numel() / max(1, taken.numel())
            seen = (torch.view_as_real(taken) if taken.is_complex() else taken).double()
            _, once, squared = self._sums.get(name, (weight, torch.zeros_like(seen), torch.zeros_like(seen)))
            self._sums[name] = weight, once + seen, squared + seen.square()

    def variance(self) -> float:
        """Return the squared distance that is expected of a batch's gradient to the mean of all there might be."""
        if self.batches < 2:
            return 0.0
        total = sum(
            weight * float((squared - once.square() / self.batches).sum())
            for weight, once, squared in self._sums.values()
        )
        return max(0.0, total / (self.batches - 1))

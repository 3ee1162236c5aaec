"""Measures how far parameters move in an update: the training dynamics of SlimFit.

The weights before an update are copied for as long as it takes, so a plan counts as much workspace for it. Sums leave
the device at once, for they take bytes that no plan counts, but a GPU does not wait for the host in the middle of a
step: they arrive before they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from stowage.stages.ir.units import Unit

CHUNK = 1 << 16
"""Elements that are divided at a time, so that quotients take little memory."""


Add = Callable[[list[float]], list[float]]

Sum = float | torch.Tensor
"""A sum that is known, or one on its way to the host."""


class Moves:
    """Measures the moves of the parameters that are in units.

    Attributes:
        relative: take the mean of |Δ/w| over all elements, equation (1) of SlimFit, instead of ‖Δ‖₁/‖w‖₁; elements that
            were 0 are left out of it.
    """

    def __init__(self, units: Sequence[Unit], relative: bool) -> None:
        self._units = units
        self._watched = {name for unit in units for name in unit.parameters}
        self.relative = relative
        self._sums: dict[str, tuple[Sum, Sum]] = {}

    def watches(self, name: str) -> bool:
        """Return whether a parameter is in a unit."""
        return name in self._watched

    @contextmanager
    def of(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Measure the moves of some parameters, which an update inside makes."""
        before = {name: p.detach().clone() for name, p in parameters.items() if name in self._watched}
        yield
        for name in list(before):
            self.measured(name, before.pop(name), parameters[name].detach())

    def measured(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """Take in an update; `old` is used up."""
        if self.relative:
            moved, weight = _quotients(old.reshape(-1), new.reshape(-1))
        else:
            weight = torch.linalg.vector_norm(old, 1)
            moved = torch.linalg.vector_norm(old.sub_(new), 1)
        self._sums[name] = _to_host(moved), _to_host(weight)

    def take(self, over_all: Add = list) -> dict[str, float]:
        """Return the distance of each unit that was updated since the last call.

        Args:
            over_all: adds numbers up over all ranks, each of which has measured its shards.
        """
        updated: list[str] = []
        sums: list[float] = []
        if any(isinstance(part, torch.Tensor) for pair in self._sums.values() for part in pair):
            torch.accelerator.synchronize()
        for unit in self._units:
            own = [self._sums[name] for name in unit.parameters if name in self._sums]
            if own:
                updated.append(unit.name)
                sums += (float(sum(float(part[i]) for part in own)) for i in (0, 1))
        self._sums.clear()
        pairs = iter(over_all(sums) if sums else ())
        return {
            name: above / below if below else (float("inf") if above else 0.0)
            for name, above, below in zip(updated, pairs, pairs, strict=True)
        }


def _to_host(number: torch.Tensor) -> Sum:
    """Return a number, or start its copy to pinned memory."""
    return float(number) if number.device.type == "cpu" else number.to("cpu", non_blocking=True)


def _quotients(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of |Δ/w| over the elements that were not 0, and their number."""
    total, count = torch.zeros((), device=old.device), torch.zeros((), device=old.device)
    for start in range(0, old.numel(), CHUNK):
        before, after = old[start : start + CHUNK], new[start : start + CHUNK]
        was = before != 0
        total += torch.where(was, (after - before) / before, 0).abs().sum()
        count += was.sum()
    return total, count

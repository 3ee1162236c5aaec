"""Measures how far parameters move in an update: the training dynamics of SlimFit.

The weights before an update are copied for as long as it takes, so a plan counts as much workspace for it. Sums leave
the device at once, for they take bytes that no plan counts, but a GPU does not wait for the host in the middle of a
step: they arrive before they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from stowage.stages.ir.move_bytes import taken_at_once
from stowage.stages.ir.units import Unit

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
        sums = _quotients if self.relative else _changes
        moved: Sum = 0.0
        weight: Sum = 0.0
        for before, after in _pieces(old, new, self.relative):
            more, beside = sums(before, after)
            moved, weight = moved + more, weight + beside
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


def _to_host(number: Sum) -> Sum:
    """Return a number, or start its copy to pinned memory."""
    return number.to("cpu", non_blocking=True) if isinstance(number, torch.Tensor) else number


def _known(number: torch.Tensor) -> Sum:
    """Return a number of the host's memory at once, so that it takes no bytes."""
    return float(number) if number.device.type == "cpu" else number


def _pieces(old: torch.Tensor, new: torch.Tensor, relative: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same elements of both in the order in which they lie in memory, so that nothing is copied."""
    numel = old.numel()
    if old.stride() == new.stride() and _fills_its_memory(new):
        old, new = (tensor.as_strided((numel,), (1,), tensor.storage_offset()) for tensor in (old, new))
    elif old.dim() > 1:
        for before, after in zip(old, new, strict=True):
            yield from _pieces(before, after, relative)
        return
    at_once = max(taken_at_once(numel, old.element_size(), old.device.type, relative=relative), 1)
    for start in range(0, numel, at_once):
        yield old[start : start + at_once], new[start : start + at_once]


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether elements lie without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the type to sum in: narrow ones overflow."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _changes(old: torch.Tensor, new: torch.Tensor) -> tuple[Sum, Sum]:
    """Return ‖Δ‖₁ and ‖w‖₁; `old` is used up."""
    weight = _known(torch.linalg.vector_norm(old, 1, dtype=_wide(old)))
    return _known(torch.linalg.vector_norm(old.sub_(new), 1, dtype=_wide(old))), weight


def _quotients(old: torch.Tensor, new: torch.Tensor) -> tuple[Sum, Sum]:
    """Return the sum of |Δ/w| over the elements that were not 0, and their number; `old` is used up."""
    count = _known(old.count_nonzero())
    wide = _wide(old)
    moved = new - old if old.dtype == wide else new.to(wide).sub_(old)
    old.masked_fill_(old == 0, float("inf"))  # so that their quotients are 0
    return _known(torch.linalg.vector_norm(moved.div_(old), 1)), count

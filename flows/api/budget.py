"""The device budget of a run: bytes, a share of the largest step, the free memory, or what planning finds."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError
from stowage.stages.runtime.sharding.agreement import together
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.settings.budgets import check_budget
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import AutoBudget, Sought, auto_budget, free_ram
from stowage.stages.solve.free import Free

Search = Callable[[str], Sought]
"""Finds the budget that `smallest` or `+5%` stands for, for the step at hand."""


class RunBudget:
    """The device budget of a run, which may grow as steps appear and never shrinks.

    A percentage is of the predicted peak of plain PyTorch on the largest batch so far; a budget that is searched for is
    the one of the step that takes most so far.

    Attributes:
        nbytes: the budget so far; 0 before a step is known, where it depends on one.
        grows: the budget is a percentage.
        sought: planning finds the budget.
        said: says for people how the budget was found, if it was not given in bytes.
    """

    def __init__(self, asked: str | int, auto: Callable[[], AutoBudget] | None = None) -> None:
        """Take a budget as people write it.

        Args:
            asked: the budget; see `fit`.
            auto: finds what `auto` stands for; without it `auto` is refused.

        Raises:
            ParameterError: it is no budget, or nothing is free.
        """
        self._asked = asked
        kind = check_budget(asked, "device_budget")
        self.grows = kind == "share"
        self.sought = kind in ("smallest", "slowdown")
        self.nbytes, self.said, self._largest_bytes = 0, "", 0
        if kind == "size":
            self.nbytes = resolve_budget(asked, 0, "device_budget")
        elif kind == "auto":
            if auto is None:
                raise ParameterError("device_budget 'auto' is not known here: give a budget in bytes.")
            found = auto()
            self.nbytes, self.said = found.nbytes, found.said

    def see(self, eager_peak_bytes: int, search: Search | None = None) -> int:
        """Return the budget in bytes, now that a step is known.

        Args:
            eager_peak_bytes: peak of the step in plain PyTorch.
            search: plans the step within any budget, where it was measured in full.
        """
        if self.grows:
            self.nbytes = max(self.nbytes, resolve_budget(self._asked, eager_peak_bytes, "device_budget"))
        if self.sought and search is not None:
            found = search(str(self._asked))
            if found.nbytes > self.nbytes:
                self.nbytes, self.said = found.nbytes, found.said
            self._largest_bytes = max(self._largest_bytes, eager_peak_bytes)
        return self.nbytes

    def adopt(self, nbytes: int, said: str) -> None:
        """Take the budget that another rank has found for all."""
        self.nbytes, self.said = nbytes, said

    def must_search(self, eager_peak_bytes: int) -> bool:
        """Return whether a step with this peak in plain PyTorch may need a larger budget than was found so far."""
        return self.sought and eager_peak_bytes > self._largest_bytes


def free_for(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, ranks: Ranks | None = None
) -> AutoBudget:
    """Return what is free on a device for training a model, which may be there already, less a reserve.

    Ranks, which all call this together, divide what is free among those that share the memory, and all get the least.

    Raises:
        ParameterError: nothing is free, or the free memory is unknown.
        RankError: so it is for another rank.
    """
    if ranks is None:
        return auto_budget(_free(device), _owned_bytes(model, optimizer, device))
    places = ranks.all(_memory_of(device), "where ranks have their memory")  # all have their models by now
    sharing = places.count(places[ranks.rank])

    def own() -> AutoBudget:
        free = _free(device)
        where = f"{free.where} for each of the {sharing} ranks there" if sharing > 1 else free.where
        return auto_budget(Free(free.nbytes // sharing, where), _owned_bytes(model, optimizer, device))

    found = ranks.all(together(ranks, own), "what is free for each rank")
    return min(found, key=lambda budget: budget.nbytes)


def _memory_of(device: torch.device) -> tuple[str, str]:
    """Return the name of the memory that a device computes in: of a CPU that of its host."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    return socket.gethostname(), own


def _free(device: torch.device) -> Free:
    """Return what is free on a device."""
    if device.type != "cuda":
        return free_ram()
    free, _ = torch.cuda.mem_get_info(device)
    # PyTorch's allocator caches memory that no tensor uses.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Free(free + cached, torch.cuda.get_device_name(device))


def _owned_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Return the bytes of the model, its gradients and the optimizer's states on a device, each storage once."""
    storages = {}
    for tensor in _tensors(model, optimizer):
        if tensor.device.type == device.type and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return sum(storages.values())


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (t for t in state.values() if isinstance(t, torch.Tensor))

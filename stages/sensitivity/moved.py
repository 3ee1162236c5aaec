"""Makes copies of a step's weights that are moved a little, as training moves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch

from stowage.stages.sensitivity.interpreter import StepTensors

DISTANCE = 0.05
"""Standard deviation of what is added to a weight, over the root mean square of the weights of its parameter.

Several times the rounding of 8 bits, so that other elements are rounded to 0; the gradient stays about as large.
"""


def moved(live: StepTensors, seed: int) -> StepTensors:
    """Return a step's tensors with other weights; parameters that share memory, as tied ones do, share it in the copy.

    Args:
        live: the step's tensors, which stay as they are.
        seed: of what is added; no generator of the process is drawn from.
    """
    draws: dict[torch.device, torch.Generator] = {}
    made: dict[int, torch.Tensor] = {}
    copies = _Copies(live.parameters.values())
    for parameter in live.parameters.values():
        if id(parameter) not in made:
            weights = parameter.detach()
            if weights.device not in draws:
                draws[weights.device] = torch.Generator(weights.device).manual_seed(seed)
            made[id(parameter)] = copies.moved(weights, draws[weights.device])
    return replace(live, parameters={name: made[id(p)] for name, p in live.parameters.items()})


class _Copies:
    """Copies of weights, with one copy of the memory that several of them share."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        distinct = {id(p): p for p in parameters}
        self._users = Counter(p.untyped_storage()._cdata for p in distinct.values())
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._views: dict[Hashable, torch.Tensor] = {}

    def moved(self, weights: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        drawn = weights.is_complex() or (weights.is_floating_point() and weights.element_size() > 1)
        if not drawn or not weights.numel():
            return weights
        storage = weights.untyped_storage()
        if self._users[storage._cdata] == 1:
            return _noise(weights, draws).add_(weights)
        where = storage._cdata, weights.dtype, weights.storage_offset(), weights.shape, weights.stride()
        if where not in self._views:
            if storage._cdata not in self._memory:
                self._memory[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
            own = torch.empty(0, dtype=weights.dtype, device=weights.device)
            view = own.set_(self._memory[storage._cdata], *where[2:])  # type: ignore[call-overload]
            # What several elements of an expanded tensor share cannot be moved for each of them.
            self._views[where] = view if _is_expanded(view) else view.add_(_noise(view, draws))
        return self._views[where]


def _is_expanded(weights: torch.Tensor) -> bool:
    return any(not stride and size > 1 for size, stride in zip(weights.shape, weights.stride(), strict=True))


def _noise(weights: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    size = float(torch.linalg.vector_norm(weights)) / weights.numel() ** 0.5
    return torch.empty_like(weights).normal_(generator=draws).mul_(DISTANCE * size)

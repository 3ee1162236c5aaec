"""Tries on copies whether an optimizer's update of a shard is that part of its update of the whole tensor.

It is for optimizers that treat each element by itself, such as SGD, AdamW and Lion, and not for those that look at
whole rows, matrices or norms, such as Adafactor, Muon and LAMB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.collectives import ShardForm
from stowage.stages.optimizers.content import Path, leaves_of, named, same_bits, same_leaf, snapshot
from stowage.stages.optimizers.quiet import SEED, quiet
from stowage.stages.optimizers.single import bare_step
from stowage.stages.optimizers.trial import SCALES, chosen_parameters, real_device
from stowage.stages.optimizers.twin import twin_of

RANKS = 2

EVEN = {0: (), 1: (16384,), 2: (64, 256), 3: (64, 16, 16), 4: (64, 16, 4, 4)}
"""Number of dimensions -> a shape whose shards begin and end where blocks of any kernel do; `MANY` with more."""

ODD = {0: (), 1: (16191,), 2: (63, 257), 3: (63, 17, 15), 4: (63, 17, 5, 3)}
"""Number of dimensions -> a shape whose shards begin and end within such blocks."""

MANY = 4


@dataclass(frozen=True)
class OnShards:
    """How an optimizer's updates of shards compare with those of whole tensors.

    Attributes:
        differs: what is not the same part of the whole; "" where everything is.
        rounds: True if bits depend on where in a tensor an element is, as its kernels treat the last ones differently.
    """

    differs: str
    rounds: bool


def on_shards(optimizer: torch.optim.Optimizer) -> OnShards:
    """Compare bit for bit, over several steps, on parameters and states.

    Raises:
        TraceError: the optimizer cannot be copied.
    """
    with quiet():
        chosen = [parameter for _, parameter in chosen_parameters(optimizer, _order)]
        differs = _difference(optimizer, chosen, EVEN)
        turned = next((p for p in chosen if _order(p)[:1] not in ((), (0,))), None)
        if differs and turned is not None and not _difference(optimizer, chosen, EVEN, row_major=True):
            differs = (
                f"a parameter of shape {tuple(turned.shape)} lies in memory with strides {turned.stride()}, so its "
                "shards have one dimension, and it updates those otherwise than what has more (make it contiguous)"
            )
        return OnShards(differs, not differs and bool(_difference(optimizer, chosen, ODD)))


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of memory; those of one element keep their places."""
    cut = [d for d, size in enumerate(tensor.shape) if size > 1]
    outermost = iter(sorted(cut, key=lambda d: -tensor.stride()[d]))
    return tuple(next(outermost) if d in cut else d for d in range(tensor.dim()))


def _difference(
    optimizer: torch.optim.Optimizer,
    chosen: Sequence[torch.Tensor],
    shapes: dict[int, Any],
    *,
    row_major: bool = False,
) -> str:
    """Return the first thing that differs; "" where nothing does."""
    wholes = [_stand_in(parameter, shapes, row_major) for parameter in chosen]
    forms = [_form(whole) for whole in wholes]
    whole = _Steps(optimizer, chosen, [_drawn(w, i) for i, w in enumerate(wholes)])
    ranks = [
        _Steps(optimizer, chosen, [cut(form, rank, p) for form, p in zip(forms, whole.contents())])
        for rank in range(RANKS)
    ]
    for step in range(len(SCALES)):
        gradients = [_drawn(w, len(wholes) * (step + 1) + i) * SCALES[step] for i, w in enumerate(wholes)]
        try:
            whole.step(gradients)
            for rank, steps in enumerate(ranks):
                steps.step([cut(form, rank, g) for form, g in zip(forms, gradients)])
        except Exception as error:
            return f"it cannot step for shards ({type(error).__name__}: {str(error).rstrip('.')})"
    parts = [rank.found() for rank in ranks]
    for path, leaf in whole.found().items():
        where = ".".join(p.removeprefix(".") for p in path)
        if any(path not in part for part in parts):
            return f"its states for shards are others ({where})"
        if not _same(leaf, [part[path] for part in parts], wholes):
            return f"{where} depends on all of a tensor"
    return ""


def _stand_in(parameter: torch.Tensor, shapes: dict[int, Any], row_major: bool) -> torch.Tensor:
    """Return a tensor of one of the shapes, whose elements lie in the order of the parameter's, or in that of rows."""
    dimensions = min(parameter.dim(), MANY)
    shape = (*shapes[dimensions], *(1 for _ in range(parameter.dim() - dimensions)))
    order = tuple(range(parameter.dim())) if row_major else _order(parameter)
    lies = torch.empty([shape[d] for d in order], dtype=parameter.dtype, device=real_device(parameter))
    return lies.permute([order.index(d) for d in range(parameter.dim())])


def _form(whole: torch.Tensor) -> ShardForm:
    form = ShardForm.of(whole.shape, whole.stride(), RANKS)
    assert form is not None
    return form


def _drawn(like: torch.Tensor, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.empty_like(like).copy_(torch.randn(like.shape, generator=generator, device="cpu"))


def cut(form: ShardForm, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """Return a rank's shard of a dense tensor, padded with zeros."""
    flat = whole.as_strided((whole.numel(),), (1,))
    begin = rank * form.shard_elements
    own = flat[begin : begin + form.shard_elements]
    shard = flat.new_zeros(form.shard_elements)
    shard[: own.numel()].copy_(own)
    return shard.as_strided(form.shape, form.stride)


def _same(whole: Any, parts: Sequence[Any], parameters: Sequence[torch.Tensor]) -> bool:
    """Say whether the parts are those of the whole, or all equal to it where nothing was cut.

    Args:
        whole: a parameter, or what an optimizer keeps.
        parts: the same of each rank.
        parameters: those that were cut.
    """
    if not isinstance(whole, torch.Tensor) or all(part.shape == whole.shape for part in parts):
        return all(same_leaf(whole, part) for part in parts)
    flat, elements = torch.cat([part.reshape(-1) for part in parts]), math.prod(whole.shape)
    if flat.numel() < elements:
        return False
    if all(part.dim() == whole.dim() for part in parts):
        return same_bits(flat[:elements], whole.reshape(-1))
    orders = {_order(p) for p in parameters if p.shape == whole.shape}  # parts are in the order of memory
    return any(same_bits(flat[:elements], whole.permute(order).reshape(-1)) for order in orders)


class _Steps:
    """The steps of one copy of the optimizer, on tensors of its own."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, chosen: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]
    ) -> None:
        self._parameters = [nn.Parameter(content.clone()) for content in contents]
        self._optimizer = twin_of(optimizer, {id(p): own for p, own in zip(chosen, self._parameters)})
        self._names = named({f"parameter {i}": p for i, p in enumerate(self._parameters)})

    def contents(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._parameters]

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient.clone()
        bare_step(self._optimizer)
        for parameter in self._parameters:
            parameter.grad = None

    def found(self) -> dict[Path, Any]:
        """Return parameters, states and groups as they are now."""
        content = leaves_of(vars(self._optimizer), self._names)
        content |= {(name,): p.detach() for name, p in zip(self._names.values(), self._parameters)}
        return snapshot(content)

"""Tensors with made-up contents, of several kinds: not every operator takes every number."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stowage.stages.kernels.forms import Form


@dataclass(frozen=True)
class Around:
    """What the other arguments of a call are like.

    Attributes:
        index: an index must be below it, wherever it points: the smallest dimension, or number among the arguments.
        rows: of the first tensor.
    """

    index: int = 2
    rows: int = 1

    @staticmethod
    def of(forms: Iterable[Form], arguments: Iterable[Any] = ()) -> Around:
        """From the forms of all tensors among the arguments, and the arguments themselves."""
        forms = list(forms)
        into = [f for f in forms if f.dtype.is_floating_point or f.dtype.is_complex] or forms
        sizes = [*(n for f in into for n in f.shape), *_whole_numbers(arguments)]
        return Around(min((n for n in sizes if n > 0), default=1), next((f.shape[0] for f in into if f.shape), 1))


def _whole_numbers(arguments: Iterable[Any]) -> Iterator[int]:
    """A number of rows may stand among them (`embedding_dense_backward`)."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _whole_numbers(argument)
        elif isinstance(argument, int) and not isinstance(argument, bool):
            yield argument


Fill = Callable[[torch.Tensor, Around], None]
"""Changes the contents of a fresh tensor."""


@dataclass(frozen=True)
class Kind:
    """One kind of contents.

    Attributes:
        name: for people.
        floats, integers, booleans: what is in tensors of these types.
    """

    name: str
    floats: Fill
    integers: Fill
    booleans: Fill


def _probabilities(tensor: torch.Tensor, around: Around) -> None:
    """In [0.5, 1): probabilities, arguments of logarithms and roots, and neither large nor small."""
    del around
    if tensor.is_complex():
        tensor.copy_(torch.rand(tensor.shape, device=tensor.device).mul_(0.48).add_(0.5))
    else:
        tensor.uniform_(0.5, 0.98) if tensor.itemsize > 1 else tensor.copy_(torch.full((), 0.75, device="cpu"))


def _large(tensor: torch.Tensor, around: Around) -> None:
    """In [1.5, 2)."""
    _probabilities(tensor, around)
    tensor.add_(1.0)


def _definite(tensor: torch.Tensor, around: Around) -> None:
    """Square matrices are symmetric, positive definite and well conditioned."""
    _probabilities(tensor, around)
    if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] and tensor.shape[-1] > 0:
        tensor.copy_(torch.eye(tensor.shape[-1], device=tensor.device).mul_(2.0).to(tensor.dtype).expand_as(tensor))


def _few(tensor: torch.Tensor, around: Around) -> None:
    """0 and 1, below the bound: an index of 1 into a dimension of 1 is outside."""
    tensor.random_(0, max(1, min(2, around.index)))


def _zeros(tensor: torch.Tensor, around: Around) -> None:
    del around
    tensor.zero_()


def _ones(tensor: torch.Tensor, around: Around) -> None:
    del around
    tensor.fill_(1)


def _pivots(tensor: torch.Tensor, around: Around) -> None:
    """1, 2, 3, … along the last dimension, as LAPACK has them."""
    del around
    count = tensor.shape[-1] if tensor.dim() else 1
    tensor.copy_(torch.arange(1, count + 1, device=tensor.device).expand_as(tensor))


def _lengths(tensor: torch.Tensor, around: Around) -> None:
    """Of segments that share so many rows."""
    tensor.zero_()
    if tensor.numel():
        tensor.select(-1, 0).fill_(around.rows) if tensor.dim() else tensor.fill_(around.rows)


def _ends(tensor: torch.Tensor, around: Around) -> None:
    """Where groups of rows end that share them evenly."""
    count = tensor.shape[-1] if tensor.dim() else 1
    ends = torch.arange(1, count + 1, device=tensor.device).mul_(around.rows).div_(count, rounding_mode="floor")
    tensor.copy_(ends.expand_as(tensor))


def _starts(tensor: torch.Tensor, around: Around) -> None:
    """Where such groups start; the last number is that of all rows."""
    count = tensor.shape[-1] if tensor.dim() else 1
    starts = torch.arange(count, device=tensor.device).mul_(around.rows)
    tensor.copy_(starts.div_(max(count - 1, 1), rounding_mode="floor").expand_as(tensor))


_FLOATS: tuple[Fill, ...] = (_probabilities, _definite, _large, _zeros)
_INDICES: tuple[Fill, ...] = (_few, _zeros)
_BOOLEANS: tuple[Fill, ...] = (_ones, _zeros)
_OTHERS: dict[str, tuple[Fill, ...]] = {
    "aten.linalg_lu_solve": (_pivots,),
    "aten.linalg_ldl_solve": (_pivots,),
    "aten.lu_unpack": (_pivots,),
    "aten.segment_reduce": (_lengths, _starts),
    "aten._segment_reduce_backward": (_lengths, _starts),
    "aten._grouped_mm": (_ends,),
    "transformers.grouped_mm_fallback": (_ends,),
    "transformers.grouped_mm_fallback_backward": (_ends,),
}
"""Integers that are no indices. Elsewhere they could point outside of a tensor, which not every kernel notices."""


@functools.cache
def kinds_of(target: str) -> tuple[Kind, ...]:
    """Contents for the arguments of an operator (`aten.addmm.default`) in the order in which they are tried: all
    combinations, those first that differ least from the first."""
    integers = (*_OTHERS.get(target.rpartition(".")[0], ()), *_INDICES)
    ranked = sorted(
        itertools.product(enumerate(_FLOATS), enumerate(integers), enumerate(_BOOLEANS)),
        key=lambda three: (sum(rank > 0 for rank, _ in three), [rank for rank, _ in three][::-1]),
    )
    return tuple(Kind(" ".join(f.__name__[1:] for _, f in three), *(f for _, f in three)) for three in ranked)


USUAL = Kind("usual", _probabilities, _few, _ones)
"""What most operators take."""

ANYWHERE = Around()
"""Of a tensor that is made for no call."""


def made_up(form: Form, device: torch.device, kind: Kind = USUAL, around: Around = ANYWHERE) -> torch.Tensor:
    """A tensor of a form with contents of a kind, as an argument of a call."""
    base = torch.empty(form.span, dtype=form.dtype, device=device)
    tensor = base.as_strided(form.shape, form.stride, form.offset if form.span else 0)
    if form.dtype == torch.bool:
        fill = kind.booleans
    else:
        fill = kind.floats if form.dtype.is_floating_point or form.dtype.is_complex else kind.integers
    simple = fill in (_probabilities, _few, _zeros, _ones, _large)
    target = base if simple or _overlaps(form) else tensor
    if target is tensor:
        base.zero_()
    fill(target, around)
    return tensor


@functools.lru_cache(maxsize=4096)
def _overlaps(form: Form) -> bool:
    """Whether elements share memory, such as those of expanded tensors: they cannot be written one by one."""
    if not all(form.shape):
        return False
    reached = 1
    for n, s in sorted(zip(form.shape, form.stride), key=lambda pair: pair[1]):
        if n > 1 and s < reached:
            return True
        reached = max(reached, s * n)
    return math.prod(form.shape) > form.span - form.offset

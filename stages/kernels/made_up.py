"""Makes tensors with made-up contents of several kinds, since not every operator accepts every number."""

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
    """The sizes in a call's other arguments with which made-up contents must agree.

    Attributes:
        index: every index must be less than this: the smallest dimension of, or whole number among, the arguments.
        rows: the number of rows of the first tensor.
    """

    index: int = 2
    rows: int = 1

    @staticmethod
    def of(forms: Iterable[Form], arguments: Iterable[Any] = ()) -> Around:
        """Derive the bounds from the forms of all tensors among the arguments, and from the arguments themselves."""
        forms = list(forms)
        into = [f for f in forms if f.dtype.is_floating_point or f.dtype.is_complex] or forms
        sizes = [*(n for f in into for n in f.shape), *_whole_numbers(arguments)]
        return Around(min((n for n in sizes if n > 0), default=1), next((f.shape[0] for f in into if f.shape), 1))


def _whole_numbers(arguments: Iterable[Any]) -> Iterator[int]:
    """Yield the integers among the arguments: one of them may be a number of rows (`embedding_dense_backward`)."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _whole_numbers(argument)
        elif isinstance(argument, int) and not isinstance(argument, bool):
            yield argument


Fill = Callable[[torch.Tensor, Around], None]
"""A function that writes the contents of a new tensor."""


@dataclass(frozen=True)
class ContentKind:
    """One kind of contents.

    Attributes:
        name: the name that people see.
        floats, integers, booleans: how tensors of these types are filled.
    """

    name: str
    floats: Fill
    integers: Fill
    booleans: Fill


def _probabilities(tensor: torch.Tensor, around: Around) -> None:
    """Fill with [0.5, 1): valid as probabilities and in logarithms and roots, and neither large nor small."""
    del around
    if tensor.is_complex():
        tensor.copy_(torch.rand(tensor.shape, device=tensor.device).mul_(0.48).add_(0.5))
    else:
        tensor.uniform_(0.5, 0.98) if tensor.itemsize > 1 else tensor.copy_(torch.full((), 0.75, device="cpu"))


def _large(tensor: torch.Tensor, around: Around) -> None:
    """Fill with numbers in [1.5, 2)."""
    _probabilities(tensor, around)
    tensor.add_(1.0)


def _definite(tensor: torch.Tensor, around: Around) -> None:
    """Make square matrices symmetric, positive definite and well conditioned; fill others like `_probabilities`."""
    _probabilities(tensor, around)
    if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] and tensor.shape[-1] > 0:
        tensor.copy_(torch.eye(tensor.shape[-1], device=tensor.device).mul_(2.0).to(tensor.dtype).expand_as(tensor))


def _few(tensor: torch.Tensor, around: Around) -> None:
    """Fill with 0 and 1, or with 0 alone where 1 is not a valid index."""
    tensor.random_(0, max(1, min(2, around.index)))


def _zeros(tensor: torch.Tensor, around: Around) -> None:
    del around
    tensor.zero_()


def _ones(tensor: torch.Tensor, around: Around) -> None:
    del around
    tensor.fill_(1)


def _pivots(tensor: torch.Tensor, around: Around) -> None:
    """Fill with 1, 2, 3, … along the last dimension, as LAPACK's pivots are."""
    del around
    count = tensor.shape[-1] if tensor.dim() else 1
    tensor.copy_(torch.arange(1, count + 1, device=tensor.device).expand_as(tensor))


def _lengths(tensor: torch.Tensor, around: Around) -> None:
    """Fill with lengths of segments that add up to the number of rows: the first segment has all of them."""
    tensor.zero_()
    if tensor.numel():
        tensor.select(-1, 0).fill_(around.rows) if tensor.dim() else tensor.fill_(around.rows)


def _ends(tensor: torch.Tensor, around: Around) -> None:
    """Fill with the ends of groups of rows of equal size."""
    count = tensor.shape[-1] if tensor.dim() else 1
    ends = torch.arange(1, count + 1, device=tensor.device).mul_(around.rows).div_(count, rounding_mode="floor")
    tensor.copy_(ends.expand_as(tensor))


def _starts(tensor: torch.Tensor, around: Around) -> None:
    """Fill with the starts of segments of equal size; the last number is the number of all rows."""
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
"""Operator -> contents of integer arguments that are no indices.

No other operator gets these: as indices they could point outside of a tensor, which not every kernel notices.
"""


@functools.cache
def kinds_of(target: str) -> tuple[ContentKind, ...]:
    """List the contents to try for the arguments of an operator (`aten.addmm.default`), in order.

    These are all combinations; those that differ least from the first one come first.
    """
    integers = (*_OTHERS.get(target.rpartition(".")[0], ()), *_INDICES)
    ranked = sorted(
        itertools.product(enumerate(_FLOATS), enumerate(integers), enumerate(_BOOLEANS)),
        key=lambda three: (sum(rank > 0 for rank, _ in three), [rank for rank, _ in three][::-1]),
    )
    return tuple(ContentKind(" ".join(f.__name__[1:] for _, f in three), *(f for _, f in three)) for three in ranked)


USUAL = ContentKind("usual", _probabilities, _few, _ones)
"""Contents that most operators accept."""

ANYWHERE = Around()
"""The default, for a tensor that is made for no particular call."""


def made_up(form: Form, device: torch.device, kind: ContentKind = USUAL, around: Around = ANYWHERE) -> torch.Tensor:
    """Make a tensor of the given form with contents of the given kind, as an argument of a call."""
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
    """Say whether elements share memory, as those of expanded tensors do: they cannot be written one by one."""
    if not all(form.shape):
        return False
    reached = 1
    for n, s in sorted(zip(form.shape, form.stride), key=lambda pair: pair[1]):
        if n > 1 and s < reached:
            return True
        reached = max(reached, s * n)
    return math.prod(form.shape) > form.span - form.offset

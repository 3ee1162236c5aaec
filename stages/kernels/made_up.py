"""Tensors with made-up contents, of several kinds: not every operator takes every number."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from stowage.stages.kernels.forms import Form


@dataclass(frozen=True)
class Around:
    """What the other arguments of a call are like.

    Attributes:
        index: an index must be below it, wherever it points: the smallest dimension.
        rows: of the first tensor.
    """

    index: int = 2
    rows: int = 1

    @staticmethod
    def of(forms: Iterable[Form]) -> Around:
        """From the forms of all tensors among the arguments."""
        forms = list(forms)
        into = [f for f in forms if f.dtype.is_floating_point or f.dtype.is_complex] or forms
        smallest = min((n for f in into for n in f.shape if n > 0), default=1)
        return Around(smallest, next((f.shape[0] for f in into if f.shape), 1))


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

    @property
    def stays_inside(self) -> bool:
        """No integer is an index outside of a dimension."""
        return self.integers in (_few, _zeros)


def _probabilities(tensor: torch.Tensor, around: Around) -> None:
    """In [0.5, 1): probabilities, arguments of logarithms and roots, and neither large nor small."""
    del around
    if tensor.is_complex():
        tensor.copy_(torch.rand(tensor.shape, device=tensor.device).mul_(0.48).add_(0.5))
    else:
        tensor.uniform_(0.5, 0.98) if tensor.itemsize > 1 else tensor.copy_(torch.full((), 0.75))


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


def _ascending(tensor: torch.Tensor, around: Around) -> None:
    """0, 1, 2, … along the last dimension, such as offsets and permutations."""
    del around
    tensor.copy_(torch.arange(tensor.shape[-1] if tensor.dim() else 1, device=tensor.device).expand_as(tensor))


def _pivots(tensor: torch.Tensor, around: Around) -> None:
    """1, 2, 3, … along the last dimension, such as pivots of LAPACK."""
    _ascending(tensor, around)
    tensor.add_(1)


def _lengths(tensor: torch.Tensor, around: Around) -> None:
    """Of segments that share so many rows."""
    tensor.zero_()
    if tensor.numel():
        tensor.select(-1, 0).fill_(around.rows) if tensor.dim() else tensor.fill_(around.rows)


_FLOATS: tuple[Fill, ...] = (_probabilities, _definite, _large, _zeros)
_INTEGERS: tuple[Fill, ...] = (_few, _zeros, _ones, _pivots, _ascending, _lengths)
_BOOLEANS: tuple[Fill, ...] = (_ones, _zeros)


def _kinds() -> tuple[Kind, ...]:
    """All combinations, those first that differ least from the first."""
    ranked = sorted(
        itertools.product(enumerate(_FLOATS), enumerate(_INTEGERS), enumerate(_BOOLEANS)),
        key=lambda three: (sum(rank > 0 for rank, _ in three), [rank for rank, _ in three][::-1]),
    )
    return tuple(Kind(" ".join(f.__name__[1:] for _, f in three), *(f for _, f in three)) for three in ranked)


KINDS = _kinds()
"""In the order in which they are tried. Small indices come first: one outside ends a process on a GPU."""


ANYWHERE = Around()
"""Of a tensor that is made for no call."""


def made_up(form: Form, device: torch.device, kind: Kind = KINDS[0], around: Around = ANYWHERE) -> torch.Tensor:
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

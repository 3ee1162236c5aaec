"""What PyTorch computes in one of two ways by what tensors contain, which it does not look at while it is traced.

ATen takes a slower way of the same value and other bits where tensors may not be read (`isTensorSubclassLike`): the
gradient of a product of elements is computed without asking whether one of them is zero, and the weights of the classes
of targets are added with zeros in the place of what is ignored. These operators look, as eager does.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten


@torch.library.custom_op("stowage::prod_gradient", mutates_args=())
def prod_gradient(
    gradient: torch.Tensor, x: torch.Tensor, product: torch.Tensor, dim: int | None, keepdim: bool
) -> torch.Tensor:
    """Return the gradient of `x.prod()`, or of `x.prod(dim, keepdim)`, as `prod_backward` of ATen computes it.

    Args:
        gradient: of the product.
        x: of any shape.
        product: the product.
        dim: the dimension; None for all elements.
        keepdim: the product has that dimension, of size 1.
    """
    if not x.dim():
        return gradient.clone()
    if dim is not None and not keepdim:
        gradient, product = gradient.unsqueeze(dim), product.unsqueeze(dim)
    zero = x == 0
    if not zero.any():
        return _without_zeros(gradient, x, product)
    if dim is not None:
        found = _with_zeros(gradient, x, dim)
    elif zero.sum() > 1:
        found = torch.zeros_like(x)
    else:
        found = _with_zeros(gradient, x.contiguous().view(-1), 0).view_as(x)
    empty = torch.empty_like(_without_zeros(gradient, x, product))
    return found if found.stride() == empty.stride() else empty.copy_(found)


@prod_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, product: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    if not x.dim():
        return gradient.clone()
    if dim is not None and not keepdim:
        gradient, product = gradient.unsqueeze(dim), product.unsqueeze(dim)
    return torch.empty_like(_without_zeros(gradient, x, product))


def _without_zeros(gradient: torch.Tensor, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    return gradient * (product / x).conj().resolve_conj()


def _with_zeros(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the gradient from products of what is before and what is behind each element."""
    if x.shape[dim] == 1:
        return gradient.clone()
    shape = list(x.shape)
    shape[dim] = 1
    ones, count = torch.ones(shape, dtype=gradient.dtype, device=gradient.device), x.shape[dim] - 1
    before = torch.cat((ones, x.narrow(dim, 0, count)), dim).cumprod(dim)
    behind = torch.cat((ones, x.narrow(dim, 1, count).flip(dim)), dim).cumprod(dim).flip(dim)
    return gradient * (before * behind).conj().resolve_conj()


@torch.library.custom_op("stowage::weight_of_targets", mutates_args=())
def weight_of_targets(weight: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """Return the sum of the weights of targets that are not ignored.

    Args:
        weight: of each class.
        target: classes, of any shape.
        ignored: which of them are ignored.
    """
    total: torch.Tensor = weight.gather(0, target.masked_select(~ignored).flatten()).sum()
    return total


@weight_of_targets.register_fake
def _(weight: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    del target, ignored
    return weight.new_empty(())

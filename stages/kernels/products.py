"""Products with a weight that PyTorch computes in one of two ways, by whether the weight requires gradients.

`torch.matmul(x, weight)` of more than two dimensions by two copies an `x` that does not lie in order into one matrix if
the weight requires gradients, and else multiplies batch by batch. The bits differ. Where a weight trains in some steps
and is frozen in others, one operator does what PyTorch would do in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.utils.flop_counter import register_flop_formula

MATRIX = 2


@torch.library.custom_op("stowage::matmul", mutates_args=())
def matmul(
    x: torch.Tensor, weight: torch.Tensor, left: bool, deciders: Sequence[torch.Tensor], trains: bool
) -> torch.Tensor:
    """Return `x @ weight` by the kernels that plain PyTorch takes; with `left`, `weight.mT @ x.mT`.

    Args:
        x: of shape (..., rows, inner), not laid out as one matrix of all rows.
        weight: of shape (inner, columns), or (inner,).
        left: the weight is on the left, so that the product has the shape (..., columns, rows).
        deciders: the parameters that the weight is made of.
        trains: one of them requires gradients, and so the weight does.
    """
    del deciders
    if left:
        return torch.matmul(turned(weight).detach().requires_grad_(trains), x.mT).detach()
    return torch.matmul(x, weight.detach().requires_grad_(trains)).detach()


@matmul.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, left: bool, deciders: Sequence[torch.Tensor], trains: bool
) -> torch.Tensor:
    del deciders, trains
    rows, columns = x.shape[-2], weight.shape[1:]
    return x.new_empty((*x.shape[:-2], *((*columns, rows) if left else (rows, *columns))))


@torch.library.custom_op("stowage::matmul_input_gradient", mutates_args=())
def matmul_input_gradient(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    left: bool,
    in_columns: bool,
    own_layout: bool,
    deciders: Sequence[torch.Tensor],
    trains: bool,
) -> torch.Tensor:
    """Return the gradient of `x` by the kernels that plain PyTorch takes.

    Args:
        gradient: of the product, or with `left` its transpose, of shape (..., rows, columns) or (..., rows).
        weight: of shape (inner, columns), or (inner,).
        left: the weight is on the left.
        in_columns: autograd lays out the gradient in columns where the weight trains, see `lies_in_columns`.
        own_layout: the gradient of a frozen weight's product is laid out as in plain PyTorch, and not as if it trained.
        deciders: the parameters that the weight is made of.
        trains: one of them requires gradients.
    """
    del deciders
    shape = _shape(gradient, weight)
    weight = weight.conj()
    if trains and weight.dim() < MATRIX:
        return gradient.reshape(-1).outer(weight).view(shape)
    weight = weight.view(weight.shape[0], -1)
    inner, columns = weight.shape
    if trains:
        products = gradient.reshape(-1, columns)
        found = weight.mm(products.t()).t() if in_columns else products.mm(weight.t())
        return found.view(shape)
    gradient = gradient.reshape(*shape[:-1], columns)
    batches, rows = math.prod(shape[:-2]), shape[-2]
    repeated = weight.expand(batches, inner, columns)
    if left:
        found = repeated.bmm(gradient.mT.reshape(batches, columns, rows)).view(*shape[:-2], inner, rows).mT
    else:
        found = gradient.reshape(batches, rows, columns).bmm(repeated.transpose(1, 2)).view(shape)
    return found if own_layout else laid_out(found, _empty(gradient, shape, in_columns=in_columns))


@matmul_input_gradient.register_fake
def _(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    left: bool,
    in_columns: bool,
    own_layout: bool,
    deciders: Sequence[torch.Tensor],
    trains: bool,
) -> torch.Tensor:
    del deciders
    shape = _shape(gradient, weight)
    if own_layout and not trains:
        return gradient.new_empty((*shape[:-2], shape[-1], shape[-2])).mT if left else gradient.new_empty(shape)
    return _empty(gradient, shape, in_columns=in_columns)


def _empty(like: torch.Tensor, shape: tuple[int, ...], *, in_columns: bool) -> torch.Tensor:
    """Return an empty gradient that lies as that of a weight that trains."""
    inner, count = shape[-1], math.prod(shape[:-1])
    return (like.new_empty((inner, count)).t() if in_columns else like.new_empty((count, inner))).view(shape)


def laid_out(found: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Return what was found, in the empty tensor if that lies otherwise."""
    return found if found.stride() == empty.stride() else empty.copy_(found)


def _shape(gradient: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape (..., rows, inner) of `x`."""
    return (*gradient.shape[: gradient.dim() - weight.dim() + 1], weight.shape[0])


def turned(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix turned, and a vector as it is."""
    return weight.mT if weight.dim() == MATRIX else weight


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight that trains, by plain calls.

    Args:
        gradient: of the product, of shape (..., rows, columns) or (..., rows).
        x: of shape (..., rows, inner).
        weight: of shape (inner, columns), or (inner,); the layout of the result follows its own.
    """
    inner, count = x.shape[-1], math.prod(x.shape[:-1])
    rows, products = x.reshape(count, inner).conj(), gradient.reshape(count, *weight.shape[1:])
    if weight.dim() < MATRIX:
        return rows.t().mv(products)
    if weight.stride() == (1, inner):  # as autograd does, to lay the result out in columns
        return products.t().mm(rows).t()
    return rows.t().mm(products)


def depends_on_training(x: torch.Tensor, weight: torch.Tensor, *, left: bool = False) -> bool:
    """Say whether PyTorch computes `x @ weight` by other kernels if the weight requires gradients.

    With `left` it computes `weight.mT @ x.mT`, for a matrix by others however `x` lies. The rule is `should_fold` of
    ATen's LinearAlgebra.cpp.
    """
    if x.dim() <= MATRIX or weight.dim() not in (1, MATRIX) or x.dtype != weight.dtype:
        return False
    return (left and weight.dim() == MATRIX) or not _in_order(x, range(x.dim() - 1))


def lies_in_columns(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether autograd lays out the gradient of `x` in columns: `x` is one matrix that lies so, times a matrix."""
    leading = [i for i in range(x.dim() - 1) if x.shape[i] > 1]
    in_columns = _in_order(x, leading) and (x.stride(leading[-1]), x.stride(-1)) == (1, math.prod(x.shape[:-1]))
    return in_columns and weight.dim() == MATRIX


def _in_order(x: torch.Tensor, dimensions: Sequence[int]) -> bool:
    """Say whether some neighbouring dimensions can be taken for one."""
    return bool(dimensions) and all(x.stride(i) == x.stride(j) * x.shape[j] for i, j in pairwise(dimensions))


@register_flop_formula([torch.ops.stowage.matmul, torch.ops.stowage.matmul_input_gradient])  # type: ignore[untyped-decorator]
def _(x: torch.Size, weight: torch.Size, *others: object, out_shape: object = None, **more: object) -> int:
    del others, out_shape, more
    return 2 * math.prod(x[:-1]) * math.prod(weight)

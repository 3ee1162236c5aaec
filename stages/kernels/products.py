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
def matmul(x: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
    """Return `x @ weight` by the kernels that plain PyTorch takes.

    Args:
        x: of shape (..., rows, inner), not laid out as one matrix of all rows.
        weight: of shape (inner, columns).
        trains: the weight requires gradients.
    """
    return torch.matmul(x, weight.detach().requires_grad_(trains)).detach()


@matmul.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
    del trains
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


@torch.library.custom_op("stowage::matmul_input_gradient", mutates_args=())
def matmul_input_gradient(gradient: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
    """Return the gradient of `x` by the kernels that plain PyTorch takes.

    Args:
        gradient: of the product, of shape (..., rows, columns).
        weight: of shape (inner, columns).
        trains: the weight requires gradients.
    """
    inner, columns = weight.shape
    if trains:
        found = gradient.reshape(-1, columns).mm(weight.t())
    else:
        batches, rows = math.prod(gradient.shape[:-2]), gradient.shape[-2]
        repeated = weight.expand(batches, inner, columns)
        found = gradient.reshape(batches, rows, columns).bmm(repeated.transpose(1, 2))
    return found.view(*gradient.shape[:-1], inner)


@matmul_input_gradient.register_fake
def _(gradient: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
    del trains
    return gradient.new_empty((*gradient.shape[:-1], weight.shape[0]))


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight that trains, by plain calls.

    Args:
        gradient: of the product, of shape (..., rows, columns).
        x: of shape (..., rows, inner).
        weight: of shape (inner, columns); the layout of the result follows its own.
    """
    inner, columns = weight.shape
    count = math.prod(x.shape[:-1])
    rows, products = x.reshape(count, inner), gradient.reshape(count, columns)
    if weight.stride() == (1, inner):  # as autograd does, to lay the result out in columns
        return products.t().mm(rows).t()
    return rows.t().mm(products)


def depends_on_training(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether PyTorch computes `x @ weight` by other kernels if the weight requires gradients.

    The rule is `should_fold` of ATen's LinearAlgebra.cpp. False also for what it does that these operators do not:
    vectors, complex numbers, a weight on the left, one row or column, an `x` that is a matrix laid out in columns.
    """
    if x.dim() <= MATRIX or weight.dim() != MATRIX or x.is_complex() or x.dtype != weight.dtype:
        return False
    rows, inner = math.prod(x.shape[:-1]), x.shape[-1]
    leading = [i for i in range(x.dim() - 1) if x.shape[i] > 1]
    in_columns = _in_order(x, leading) and (x.stride(leading[-1]), x.stride(-1)) == (1, rows)
    return min(rows, inner, weight.shape[1]) > 1 and not in_columns and not _in_order(x, range(x.dim() - 1))


def _in_order(x: torch.Tensor, dimensions: Sequence[int]) -> bool:
    """Say whether some neighbouring dimensions can be taken for one."""
    return bool(dimensions) and all(x.stride(i) == x.stride(j) * x.shape[j] for i, j in pairwise(dimensions))


@register_flop_formula([torch.ops.stowage.matmul, torch.ops.stowage.matmul_input_gradient])  # type: ignore[untyped-decorator]
def _(left: torch.Size, weight: torch.Size, trains: bool, *, out_shape: object = None, **more: object) -> int:
    del trains, out_shape, more
    return 2 * math.prod(left[:-1]) * math.prod(weight)

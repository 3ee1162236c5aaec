"""Records what PyTorch computes by what tensors contain as operators that look at them when they run.

Under a mode, such as a recorder, ATen takes other kernels there, of other bits. Products of elements (`prod`) and
cross-entropy with weights of classes and smoothed labels become operators of `stages/kernels/by_content.py`; a value
that `masked_fill` fills in and that trains is refused, since `where` does the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stowage.stages.ir.errors import TraceError
from stowage.stages.kernels.by_content import prod_gradient, weight_of_targets
from stowage.stages.trace.recording.composite import composed

_ALONE = threading.RLock()
"""PyTorch has one kernel for all threads: one of them replaces it at a time."""

_KEYS = ("AutogradCPU", "AutogradCUDA")
_MEAN = 1
_aten: Any = torch.ops.aten


@contextmanager
def kernels_by_content() -> Iterator[None]:
    """Replace `aten::prod` and `aten::cross_entropy_loss` inside the block."""
    with _ALONE:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            for key in _KEYS:
                library.impl("prod", _product, key)
                library.impl("prod.dim_int", _product_of, key)
                library.impl("cross_entropy_loss", _cross_entropy, key)
            yield
        finally:
            library._destroy()


def refuse_fill(target: Any, args: Sequence[Any], place: Callable[[], str]) -> None:
    """Refuse a call that fills in a value which trains.

    Args:
        target: an operator.
        args: its arguments.
        place: says where in the user's code it is called.

    Raises:
        TraceError: it does.
    """
    if target in (_aten.masked_fill.Tensor, _aten.masked_fill_.Tensor) and args[2].requires_grad:
        raise TraceError(
            f"{place()} has masked_fill fill in a value that trains, whose gradient PyTorch adds up by what the mask "
            "holds: write torch.where(mask, value, x) instead."
        )


def _product(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiplied(x if dtype is None else x.to(dtype), None, keepdim=False)


def _product_of(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiplied(x if dtype is None else x.to(dtype), dim, keepdim=keepdim)


def _multiplied(x: torch.Tensor, dim: int | None, *, keepdim: bool) -> torch.Tensor:
    if torch._C._functorch.maybe_current_level() is not None:
        raise TraceError("prod is differentiated by torch.func: multiply the elements one by one.")
    return _Product.apply(x, dim, keepdim)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    """A product of elements and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        """Return the product."""
        with torch._C._AutoDispatchBelowAutograd():
            product: torch.Tensor = _aten.prod(x) if dim is None else _aten.prod.dim_int(x, dim, keepdim)
        ctx.save_for_backward(x, product)
        ctx.dim, ctx.keepdim = dim, keepdim
        if not product.dtype.is_floating_point and not product.dtype.is_complex:
            ctx.mark_non_differentiable(product)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of what is multiplied."""
        if torch.is_grad_enabled():
            raise TraceError(
                "A second derivative of prod is asked for, which depends on whether an element is zero: multiply the "
                "elements one by one, or add their logarithms."
            )
        x, product = ctx.saved_tensors
        return prod_gradient(gradients[0], x, product, ctx.dim, ctx.keepdim), None, None


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy as ATen composes it."""
    smooth = label_smoothing > 0.0 and x.shape != target.shape
    if weight is None or reduction != _MEAN or not smooth:
        given = x, target, weight, reduction, ignore_index, label_smoothing
        return composed(_aten.cross_entropy_loss.default, *given)  # type: ignore[no-any-return]
    if weight.requires_grad:
        raise TraceError(
            "cross_entropy with smoothed labels has weights of classes that train, whose gradient PyTorch adds up by "
            "what the targets hold: detach them."
        )
    classes = 0 if x.dim() == 1 else 1
    logs = torch.log_softmax(x, classes, dtype=x.dtype)
    nll = _aten.nll_loss_nd(logs, target, weight, reduction, ignore_index)
    shape = [1] * x.dim()
    shape[classes] = weight.shape[0]
    smoothed = -(logs * weight.view(shape)).sum(classes)
    ignored = target == ignore_index
    smoothed.masked_fill_(ignored, 0.0)
    mean = smoothed.sum() / weight_of_targets(weight, target, ignored)
    return (1 - label_smoothing) * nll + mean * (label_smoothing / logs.shape[classes])  # type: ignore[no-any-return]

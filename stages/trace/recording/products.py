"""Records products with a weight that may be frozen as operators that compute them as eager does in either case."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stowage.stages.kernels.products import depends_on_training, matmul, matmul_input_gradient, weight_gradient
from stowage.stages.trace.recording.composite import composed

_ALONE = threading.RLock()
"""PyTorch has one kernel for all threads: one of them replaces it at a time."""

_KEYS = ("AutogradCPU", "AutogradCUDA")
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    )
)
_MATMUL: Any = torch.ops.aten.matmul.default


@contextmanager
def products_by_training(taken: list[bool] | None = None, *, again: bool = False) -> Iterator[None]:
    """Replace `aten::matmul` inside the block, in this thread, where its kernels depend on what trains.

    Args:
        taken: a list that says of each such product, in their order, whether it is replaced.
        again: the list is there already, of a forward of the same model in which something else trained.
    """
    own = threading.get_ident()
    before = iter(taken or ())

    def replaces(weight: torch.Tensor) -> bool:
        if again:
            return next(before, False)
        found = torch.is_grad_enabled() and _is_parameter(weight)
        if taken is not None:
            taken.append(found)
        return found

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() == own and depends_on_training(x, weight) and replaces(weight):
            return _Product.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]
        return composed(_MATMUL, x, weight)  # type: ignore[no-any-return]

    with _ALONE:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            for key in _KEYS:
                library.impl("matmul", product, key)
            yield
        finally:
            library._destroy()


def _is_parameter(weight: torch.Tensor) -> bool:
    """Say whether a tensor requires gradients for one leaf alone, of which it is a view or a copy in another type."""
    if weight.is_leaf:
        return bool(weight.requires_grad)
    node: Any = weight.grad_fn
    while node is not None and node.name() in _VIEWS:
        ((node, _),) = node.next_functions
    return hasattr(node, "variable")


class _Product(torch.autograd.Function):
    """The product and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product as it is if the weight trains; a plan decides in each step."""
        ctx.save_for_backward(x, weight)
        product: torch.Tensor = matmul(x, weight, True)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of both."""
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return (
            matmul_input_gradient(gradient, weight, True) if ctx.needs_input_grad[0] else None,
            weight_gradient(gradient, x, weight) if ctx.needs_input_grad[1] else None,
        )

"""Records what PyTorch computes by what trains as operators that compute it as eager does in either case."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from stowage.stages.kernels.attention import attention, attention_depends_on_training, attention_gradients
from stowage.stages.kernels.products import (
    MATRIX,
    depends_on_training,
    lies_in_columns,
    matmul,
    matmul_input_gradient,
    turned,
    weight_gradient,
)
from stowage.stages.trace.recording.composite import composed
from stowage.stages.trace.recording.deciders import Taken, deciders_of

_ALONE = threading.RLock()
"""PyTorch has one kernel for all threads: one of them replaces it at a time."""

_KEYS = ("AutogradCPU", "AutogradCUDA")
_MATMUL: Any = torch.ops.aten.matmul.default
_ATTENTION: Any = torch.ops.aten.scaled_dot_product_attention.default


class Layouts:
    """Says of each call of an operator, in their order, how its results are laid out.

    Args:
        own: calls and results, by their numbers, that are laid out by what trains, as in plain PyTorch.
        frozen: nothing trains, and all are.
    """

    def __init__(self, own: Set[tuple[int, int]] = frozenset(), *, frozen: bool = False) -> None:
        self._own = own
        self._trains = not frozen
        self._count = 0

    def next(
        self, deciders: Sequence[torch.Tensor], results: int = 1
    ) -> tuple[list[bool], Sequence[torch.Tensor], bool]:
        """Return the last arguments of the next call, which has so many results."""
        own = [not self._trains or (self._count, item) in self._own for item in range(results)]
        self._count += 1
        return own, deciders, self._trains


@contextmanager
def kernels_by_training(taken: Taken | None = None, layouts: Layouts | None = None) -> Iterator[None]:
    """Replace `aten::matmul` and attention inside the block, in this thread, where kernels depend on what trains.

    Args:
        taken: remembers what is replaced; or, of a forward of the same model in which something else trained, says it.
        layouts: how results are laid out; by default as if everything trains.
    """
    own = threading.get_ident()
    calls, layouts = taken or Taken(), layouts or Layouts()

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() == own:
            left = weight.dim() > max(x.dim(), MATRIX)
            rows, matrix = (weight.mT, turned(x)) if left else (x, weight)
            if depends_on_training(rows, matrix, left=left):
                deciders = calls.next(lambda: _deciders(matrix))
                if deciders:
                    return _Product.apply(rows, matrix, left, layouts, *deciders)  # type: ignore[no-untyped-call, no-any-return]
        return composed(_MATMUL, x, weight)  # type: ignore[no-any-return]

    def attended(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> torch.Tensor:
        plain = threading.get_ident() == own and attn_mask is not None and not dropout_p and not is_causal
        scale = how.get("scale")
        if plain and not how.get("enable_gqa") and (scale is None or scale > 0):
            assert attn_mask is not None
            if attention_depends_on_training(query, key, value, attn_mask):
                deciders = calls.next(lambda: _deciders(attn_mask))
                if deciders:
                    given = query, key, value, attn_mask, scale, layouts, *deciders
                    return _Attention.apply(*given)  # type: ignore[no-untyped-call, no-any-return]
        return composed(_ATTENTION, query, key, value, attn_mask, dropout_p, is_causal, **how)  # type: ignore[no-any-return]

    with _ALONE:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            for key in _KEYS:
                library.impl("matmul", product, key)
            library.impl("scaled_dot_product_attention", attended, "AutogradCPU")
            yield
        finally:
            library._destroy()


def _deciders(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return deciders_of(tensor) if torch.is_grad_enabled() and tensor.requires_grad else ()


class _Product(torch.autograd.Function):
    """A product and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, left: bool, layouts: Layouts, *deciders: torch.Tensor
    ) -> torch.Tensor:
        """Return the product as it is if the weight trains; a plan decides in each step."""
        ctx.save_for_backward(x, weight, *deciders)
        ctx.left, ctx.layouts = left, layouts
        _, *last = layouts.next(deciders)  # it lies in one way
        product: torch.Tensor = matmul(x, weight, left, *last)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of both."""
        x, weight, *deciders = ctx.saved_tensors
        gradient = gradients[0].mT if ctx.left and weight.dim() == MATRIX else gradients[0]
        of_x, of_weight = None, None
        if ctx.needs_input_grad[0]:
            (own,), *last = ctx.layouts.next(deciders)
            of_x = matmul_input_gradient(gradient, weight, ctx.left, lies_in_columns(x, weight), own, *last)
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(gradient, x, weight)
        return of_x, of_weight, *(None for _ in ("left", "layouts", *deciders))


class _Attention(torch.autograd.Function):
    """Attention and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float | None,
        layouts: Layouts,
        *deciders: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention as it is if the mask trains; a plan decides in each step."""
        ctx.save_for_backward(query, key, value, mask, *deciders)
        ctx.scale, ctx.layouts = scale, layouts
        (own,), *last = layouts.next(deciders)
        attended: torch.Tensor = attention(query, key, value, mask, scale, own, *last)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key, value and mask."""
        query, key, value, mask, *deciders = ctx.saved_tensors
        last = ctx.layouts.next(deciders, results=3)
        found = attention_gradients(gradients[0], query, key, value, mask, ctx.scale, *last)
        needed = [g if wanted else None for g, wanted in zip(found, ctx.needs_input_grad)]
        return (*needed, *(None for _ in ("scale", "layouts", *deciders)))

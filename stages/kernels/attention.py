"""Attention with a mask that PyTorch computes in one of two ways, by whether the mask requires gradients.

On a CPU `scaled_dot_product_attention` is fused unless its mask, such as a bias that is learnt, requires gradients. The
bits differ. Where what the mask is made of trains in some steps and is frozen in others, one operator does what PyTorch
would do in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from stowage.stages.kernels.products import laid_out

HALVES = (torch.bfloat16, torch.float16)
_FUSED = 1
_aten: Any = torch.ops.aten


@torch.library.custom_op("stowage::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    own_layout: bool,
    deciders: Sequence[torch.Tensor],
    trains: bool,
) -> torch.Tensor:
    """Return attention by the kernels that plain PyTorch takes.

    Args:
        query: of shape (batch, heads, length, width).
        key: of shape (batch, heads, other length, width).
        value: of shape (batch, heads, other length, own width).
        mask: what is added to the scores, of two or four dimensions.
        scale: of the scores; by default the root of the width divides them.
        own_layout: with a frozen mask the result is laid out as in plain PyTorch, and not as if the mask trained.
        deciders: the parameters that the mask is made of.
        trains: one of them requires gradients.
    """
    del deciders
    if trains:
        return _Composed(query, key, value, mask, scale).result
    found = F.scaled_dot_product_attention(query, key, value, mask.detach(), scale=scale)
    return found if own_layout else laid_out(found, found.new_empty(found.shape))


@attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    own_layout: bool,
    deciders: Sequence[torch.Tensor],
    trains: bool,
) -> torch.Tensor:
    del deciders
    if own_layout and not trains and _is_fused(query, key, value, mask, scale):
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("stowage::attention_gradients", mutates_args=())
def attention_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    own_layouts: Sequence[bool],
    deciders: Sequence[torch.Tensor],
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value and mask by those kernels; if nothing trains, the last is nothing.

    Attention is computed again for them.

    Args:
        gradient: of the result.
        query: as for `attention`, like all that follow.
        key: see there.
        value: see there.
        mask: see there.
        scale: see there.
        own_layouts: the same for the gradients of query, key and value.
        deciders: see there.
        trains: see there.
    """
    del deciders
    if trains or not _is_fused(query, key, value, mask, scale):
        return _Composed(query, key, value, mask, scale).gradients(gradient)
    how = {"attn_mask": mask.detach(), "scale": scale}
    attended = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, **how)
    found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, *attended, 0.0, False, **how
    )
    as_trained = _empty(query, key, value)
    found = [t if own else laid_out(t, empty) for t, own, empty in zip(found, own_layouts, as_trained, strict=True)]
    return (*found, torch.zeros(mask.shape, dtype=mask.dtype, device=mask.device))


@attention_gradients.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    own_layouts: Sequence[bool],
    deciders: Sequence[torch.Tensor],
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    del gradient, deciders
    of_query, of_key, of_value = _empty(query, key, value)
    if not trains and _is_fused(query, key, value, mask, scale):
        fused = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (query, key, value)]
        found = zip(fused, (of_query, of_key, of_value), own_layouts, strict=True)
        of_query, of_key, of_value = (t if own else as_trained for t, as_trained, own in found)
    return of_query, of_key, of_value, mask.new_empty(mask.shape)


def _empty(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty gradients that lie as those of a mask that trains."""
    return query.new_empty(query.shape), key.new_empty(key.mT.shape).mT, value.new_empty(value.shape)


def _is_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> bool:
    """Say whether attention with a frozen mask is fused; real tensors are asked, since fake ones do not tell."""
    fake = isinstance(query, FakeTensor)
    with _disable_current_modes() if fake else nullcontext():
        q, k, v, bias = (_one_head(t) if fake else t.detach() for t in (query, key, value, mask))
        choice: int = torch._fused_sdp_choice(q, k, v, bias, 0.0, False, scale=scale)
    return choice == _FUSED


def _one_head(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised head of a tensor, whose rows lie as there."""
    rows, columns = like.shape[-2:]
    if like.stride(-1) == 1:
        return torch.empty((1, 1, rows, columns), dtype=like.dtype)
    return torch.empty((1, 1, columns, rows), dtype=like.dtype).mT


class _Composed:
    """Attention by the calls that PyTorch composes it of, each of whose gradients autograd computes by others.

    Attributes:
        result: the attention.
    """

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
    ) -> None:
        self._root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
        self._type = query.dtype
        query, key, value = (t.to(_type_of_sums(t.dtype)) for t in (query, key, value))
        self._shapes, self._mask_shape = (query.shape, key.shape, value.shape), mask.shape
        batches = query.shape[0] * query.shape[1]
        self._query = _aten.mul.Scalar(query, self._root).reshape(batches, *query.shape[2:])
        turned = key.transpose(-2, -1)
        self._key = _aten.mul.Scalar(turned, self._root).reshape(batches, *turned.shape[2:])
        self._value = value.reshape(batches, *value.shape[2:])
        scores = self._query.bmm(self._key)
        self._scores = (*query.shape[:2], *scores.shape[1:])
        self._weights = _aten._safe_softmax(scores.view(self._scores).add_(mask.detach()), -1)
        product = self._weights.view(scores.shape).bmm(self._value)
        self.result: torch.Tensor = product.view(*query.shape[:-1], value.shape[-1]).to(self._type)

    def gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key, value and mask."""
        query, key, value = self._shapes
        weights = self._weights.view(-1, *self._scores[2:])
        gradient = gradient.to(weights.dtype).reshape(-1, *gradient.shape[2:])
        of_value = weights.transpose(1, 2).bmm(gradient).view(value)
        of_weights = gradient.bmm(self._value.transpose(1, 2)).view(self._scores)
        of_scores = _aten._softmax_backward_data(of_weights, self._weights, -1, self._weights.dtype)
        products = of_scores.reshape(weights.shape)
        of_key = self._query.transpose(1, 2).bmm(products).view(*key[:2], key[3], key[2])
        of_query = products.bmm(self._key.transpose(1, 2)).view(query)
        found = (
            _aten.mul.Scalar(of_query, self._root),
            _aten.mul.Scalar(of_key, self._root).transpose(-2, -1),
            of_value,
            of_scores.sum_to_size(self._mask_shape),
        )
        return tuple(t.to(self._type) for t in found)  # type: ignore[return-value]


def _type_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which PyTorch composes attention of a type."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    return torch.float32 if dtype in HALVES and not allowed else dtype


def attention_depends_on_training(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Say whether these operators can compute the attention, which may then depend on whether the mask trains.

    False for what they do not do: other devices than the CPU, fewer heads of keys than of queries, masks of other types
    or shapes.
    """
    tensors = (query, key, value, mask)
    same = len({(t.dtype, t.device.type) for t in tensors}) == 1 and query.device.type == "cpu"
    shapes = all(t.dim() == 4 for t in tensors[:3]) and query.shape[:2] == key.shape[:2] == value.shape[:2]
    return same and query.dtype in (torch.float32, torch.float64, *HALVES) and shapes and mask.dim() in (2, 4)


@register_flop_formula(torch.ops.stowage.attention)  # type: ignore[untyped-decorator]
def _(query: torch.Size, key: torch.Size, value: torch.Size, *others: object, **more: object) -> int:
    del others, more
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@register_flop_formula(torch.ops.stowage.attention_gradients)  # type: ignore[untyped-decorator]
def _(gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *o: object, **more: object) -> int:
    del gradient, o, more
    return 6 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

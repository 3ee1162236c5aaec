"""Traces `nn.TransformerEncoder` in evaluation on padded sequences, which packs them into nested tensors.

No table can describe nested tensors. While a forward is traced, the functions that make them are replaced: a packed
tensor is the padded one, known by its mask, and a fused layer on it becomes the operator `stowage::encoder_layer`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stowage.stages.kernels.encoder import encoder_layer

_PROJECTIONS, _WEIGHTS = 4, 8


class _Packed:
    """Replaces functions of `torch` while a forward is traced."""

    def __init__(self) -> None:
        self._masks = WeakTensorKeyDictionary()  # type: ignore[no-untyped-call]
        self._checked = False
        self._layer: Any = torch._transformer_encoder_layer_fwd  # type: ignore[attr-defined]
        self._pad: Any = torch.Tensor.to_padded_tensor

    def left_aligned(self, source: torch.Tensor, kept: torch.Tensor) -> bool:
        """Say that padding is at the end: the operator itself checks this at each call."""
        del source, kept
        self._checked = True
        return True

    def pack(self, source: torch.Tensor, kept: torch.Tensor, mask_check: bool = True) -> torch.Tensor:
        """Return the padded tensor itself, as a view."""
        packed = source.view(source.shape)
        self._masks[packed] = kept, self._checked or mask_check
        self._checked = False
        return packed

    def layer(self, source: torch.Tensor, width: int, heads: int, *rest: Any) -> torch.Tensor:
        """Run a fused layer."""
        if source not in self._masks:
            result: torch.Tensor = self._layer(source, width, heads, *rest)
            return result
        mask = self._masks[source]
        projections, rest = list(rest[:_PROJECTIONS]), rest[_PROJECTIONS:]
        gelu, norm_first, epsilon, *weights = rest[: 3 + _WEIGHTS]
        padded: torch.Tensor = encoder_layer(
            source, *mask, width, heads, projections, bool(gelu), bool(norm_first), float(epsilon), weights
        )
        self._masks[padded] = mask
        return padded

    def pad(self, tensor: torch.Tensor, padding: float, *size: Any) -> torch.Tensor:
        """Return the result of the last layer, which is padded already."""
        if tensor in self._masks and padding == 0.0:
            return tensor
        result: torch.Tensor = self._pad(tensor, padding, *size)
        return result


def _pad(tensor: torch.Tensor, packed: _Packed, padding: float, *size: Any) -> torch.Tensor:
    return packed.pad(tensor, padding, *size)


@contextmanager
def nested_as_padded() -> Iterator[None]:
    """Replace the functions inside the block, in which a forward without gradients is traced."""
    packed = _Packed()
    names: Any = torch
    before = (
        names._nested_tensor_from_mask_left_aligned,
        names._nested_tensor_from_mask,
        names._transformer_encoder_layer_fwd,
    )
    names._nested_tensor_from_mask_left_aligned = packed.left_aligned
    names._nested_tensor_from_mask = packed.pack
    names._transformer_encoder_layer_fwd = packed.layer
    names.Tensor.to_padded_tensor = functools.partialmethod(_pad, packed)
    try:
        yield
    finally:
        (
            names._nested_tensor_from_mask_left_aligned,
            names._nested_tensor_from_mask,
            names._transformer_encoder_layer_fwd,
        ) = before
        del names.Tensor.to_padded_tensor

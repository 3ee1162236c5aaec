"""A layer of `nn.TransformerEncoder` as evaluation runs it where sequences are padded, as one operator.

PyTorch packs such sequences into a nested tensor, whose size depends on the mask, runs fused layers on it and pads the
result with zeros. Other kernels give other bits, so this operator does the same: it packs, runs one layer, and pads.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("stowage::encoder_layer", mutates_args=())
def encoder_layer(
    source: torch.Tensor,
    kept: torch.Tensor,
    checked: bool,
    width: int,
    heads: int,
    projections: list[torch.Tensor],
    gelu: bool,
    norm_first: bool,
    epsilon: float,
    weights: list[torch.Tensor],
) -> torch.Tensor:
    """One layer.

    Args:
        source: padded, batch first; the result is too.
        kept: where it is no padding.
        checked: padding may also be elsewhere than at the end, where nothing is packed.
        width, heads, gelu, norm_first, epsilon: of the layer.
        projections: weights of its attention, as `torch._transformer_encoder_layer_fwd` takes them.
        weights: of its norms and linear layers.
    """
    layer: Any = torch._transformer_encoder_layer_fwd  # type: ignore[attr-defined]
    form = (width, heads, *projections, gelu, norm_first, epsilon, *weights)
    if checked and not torch._nested_tensor_from_mask_left_aligned(source, kept):  # type: ignore[attr-defined]
        mask = torch.zeros_like(kept, dtype=source.dtype).masked_fill_(kept.logical_not(), float("-inf"))
        result: torch.Tensor = layer(source, *form, mask, 1)
    else:
        packed = torch._nested_tensor_from_mask(source, kept, mask_check=False)  # type: ignore[attr-defined]
        result = torch.Tensor.to_padded_tensor(layer(packed, *form, None, None), 0.0, source.size())
    return result.contiguous()


@encoder_layer.register_fake
def _(
    source: torch.Tensor,
    kept: torch.Tensor,
    checked: bool,
    width: int,
    heads: int,
    projections: list[torch.Tensor],
    gelu: bool,
    norm_first: bool,
    epsilon: float,
    weights: list[torch.Tensor],
) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device=source.device)

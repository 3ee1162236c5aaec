"""Wraps one layer of `nn.TransformerEncoder`, as evaluation runs it on padded sequences, into one operator.

PyTorch packs such sequences into a nested tensor, whose size depends on the mask, runs fused layers on it and pads the
result with zeros. Other kernels give other bits, so this operator also packs, runs one layer, and pads.
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
    """Run one layer and return its padded result.

    Args:
        source: the padded sequences, batch first; the result has the same shape.
        kept: the mask that is true where there is no padding.
        checked: padding may also be elsewhere than at the end; sequences with such padding are not packed.
        width: the embedding size of the layer.
        heads: its number of attention heads.
        projections: the weights of its attention, as `torch._transformer_encoder_layer_fwd` takes them.
        gelu: its activation is GELU, not ReLU.
        norm_first: it normalizes before attention and the linear layers, not after.
        epsilon: the epsilon of its layer norms.
        weights: the weights of its layer norms and linear layers.
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
def _(source: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device=source.device)

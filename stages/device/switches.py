"""Reads the switches of PyTorch that choose which kernels run, and how fast."""

from __future__ import annotations

from typing import Any

import torch


def attention_switches() -> tuple[Any, ...]:
    """Return which kernels attention may take, and in which order they are preferred."""
    cuda: Any = torch.backends.cuda
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        tuple(order()) if order is not None else (),
    )


def kernel_switches() -> str:
    """Return all that costs on a GPU depend on, in words."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    return "|".join(
        str(part)
        for part in (
            cudnn.version() if cudnn.is_available() else None,
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.deterministic,
            torch._C._get_cudnn_allow_tf32(),
            torch.get_float32_matmul_precision(),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            *attention_switches(),
        )
    )

"""Clipping by global norm in parts that can run apart, with the numbers of `torch.nn.utils.clip_grad_norm_`.

That function takes the norm of every gradient, the norm of these norms, and multiplies every gradient. Here each norm
is taken when its gradient is complete, and each gradient is multiplied right before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def clip_scale(norms: Sequence[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global norm, and the factor for every gradient.

    Args:
        norms: the norm of each gradient, in the order of the model's parameters.
        max_norm: the limit; `inf` clips nothing.
    """
    if not norms:  # nothing trains in this step
        return torch.tensor(0.0), torch.tensor(1.0)
    # clip_grad_norm_ adds up device by device and type by type; a norm has its gradient's device and type.
    grouped = _group_tensors_by_device_and_dtype([list(norms)])
    ordered = [norm for ([group], _) in grouped.values() for norm in group if norm is not None]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in ordered]), 2.0)
    return total, scale_of(total, max_norm)


def scale_of(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor for every gradient, from their global norm."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def apply_scale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Clip gradients in place: all of one device and type in one call, as `clip_grad_norm_` does it."""
    grouped = _group_tensors_by_device_and_dtype([list(gradients)]) if len(gradients) > 1 else None
    lists = [list(gradients)] if grouped is None else [group for ([group], _) in grouped.values()]
    for same in lists:
        present = [gradient for gradient in same if gradient is not None]
        torch._foreach_mul_(present, scale.to(present[0].device))

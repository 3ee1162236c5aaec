"""Fake kernels of our own, for operators whose real kernel takes more than PyTorch's fake one.

They tell type and shape; how results lie in memory is learned from the real kernel, as for every other call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

aten: Any = torch.ops.aten


def grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups of matrices, in any type; the fake kernel knows bfloat16 alone.

    A dimension that `offs` cuts into groups is two-dimensional on its side: rows of `self`, columns of `mat2`, or what
    is summed over, if both are.
    """
    del bias
    rows, columns = self.shape[-2], mat2.shape[-1]
    groups: tuple[int, ...] = ()
    if self.dim() == 3 and mat2.dim() == 3:
        groups = (self.shape[0],)
    elif self.dim() == 2 and mat2.dim() == 2 and offs is not None:
        groups = (offs.shape[0],)
    return self.new_empty((*groups, rows, columns), dtype=out_dtype or self.dtype)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and what backward needs; the fake kernel knows no lengths, though they are numbers here."""
    del blank, zero_infinity
    longest = targets.shape[1] if targets.dim() == 2 else max(target_lengths, default=0)
    steps, samples = log_probs.shape[0], log_probs.shape[1]
    return log_probs.new_empty(samples), log_probs.new_empty((samples, steps, 2 * longest + 1))


def mkldnn_rnn_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of input, weights, both biases and states, in float32 whatever the type; the fake kernel gives one
    tensor for both biases, the real one two."""
    inputs, weights, bias = args[0], args[1:3], args[3]
    states, (mode, hidden_size) = args[5:7], args[14:16]
    gates = 4 * hidden_size if mode == _GRU else bias.shape[0]
    made: Any = [inputs, *weights, bias.new_empty(gates), bias.new_empty(gates), *states]
    return tuple(like.new_empty(like.shape, dtype=torch.float32) for like in made)


_GRU = 3
"""The mode of oneDNN in which two biases of three gates become one of four."""

SUBSTITUTES: dict[OpOverload, Callable[..., Any]] = {
    operator.default: substitute
    for name, substitute in (
        ("_grouped_mm", grouped_mm),
        ("_ctc_loss", ctc_loss),
        ("mkldnn_rnn_layer_backward", mkldnn_rnn_layer_backward),
    )
    if (operator := getattr(aten, name, None)) is not None
}
"""Operator -> what it returns, under the active fake mode. Older releases lack some of them."""

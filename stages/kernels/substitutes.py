"""Fake kernels of our own, for operators whose real kernel accepts more than PyTorch's fake one.

They give the dtypes and shapes; the strides of results are learned from the real kernel, as for every other call.
"""

from __future__ import annotations

import itertools
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
    """Return products of groups of matrices, in any dtype; PyTorch's fake kernel accepts bfloat16 alone.

    `offs` cuts one dimension into groups: the rows of a two-dimensional `self`, the columns of a two-dimensional
    `mat2`, or the summed dimension if both are two-dimensional.
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
    """Return losses and what backward needs.

    PyTorch's fake kernel does not use the lengths, although they are plain numbers here.
    """
    del blank, zero_infinity
    longest = targets.shape[1] if targets.dim() == 2 else max(target_lengths, default=0)
    steps, samples = log_probs.shape[0], log_probs.shape[1]
    return log_probs.new_empty(samples), log_probs.new_empty((samples, steps, 2 * longest + 1))


def mkldnn_rnn_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return gradients of input, weights, both biases and states, in float32 whatever the dtype.

    PyTorch's fake kernel returns one tensor for both biases, the real one two.
    """
    inputs, weights, bias = args[0], args[1:3], args[3]
    states, (mode, hidden_size) = args[5:7], args[14:16]
    gates = 4 * hidden_size if mode == _GRU else bias.shape[0]
    made: Any = [inputs, *weights, bias.new_empty(gates), bias.new_empty(gates), *states]
    return tuple(like.new_empty(like.shape, dtype=torch.float32) for like in made)


def cudnn_rnn(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return output, both states, the reserve, and the weights in one buffer.

    PyTorch's fake kernel gives neither the true strides of the output nor the buffer that is made where none is given.
    The empty reserve is right in evaluation alone: in training only the real kernel tells its size, and also the few
    bytes between weights in the buffer.
    """
    inputs, weights, buffer, hx, cx = args[0], args[1], args[3], args[4], args[5]
    hidden_size, proj_size, layers, batch_first, bidirectional = args[7], args[8], args[9], args[10], args[13]
    packed, directions = bool(args[14]), 2 if bidirectional else 1
    width = (proj_size or hidden_size) * directions
    if packed:
        output, samples = inputs.new_empty((inputs.shape[0], width)), args[14][0]
    else:
        steps, samples = (inputs.shape[1], inputs.shape[0]) if batch_first else inputs.shape[:2]
        output = inputs.new_empty((steps, samples, width))
        output = output.transpose(0, 1) if batch_first else output
    hy = hx.new_empty((layers * directions, samples, proj_size or hidden_size))
    cy = hx.new_empty(0) if cx is None else cx.new_empty((layers * directions, samples, hidden_size))
    if buffer is None:
        buffer = weights[0].new_empty(sum(w.numel() for w in weights))
    return output, hy, cy, inputs.new_empty(0, dtype=torch.uint8), buffer


def cudnn_rnn_backward(*args: Any) -> tuple[Any, ...]:
    """Return gradients of the input, of both states, and, if asked for, of the weights.

    The gradients of input and states are returned whether they are asked for or not. Those of the weights are views of
    one buffer that is laid out like the weights' buffer. If no result has a gradient, none is returned.
    """
    inputs, weights, stride, buffer, hx, cx = args[:6]
    batch_first, packed, mask = args[14], bool(args[18]), args[21]
    if all(gradient is None for gradient in args[7:10]):
        return None, None, None, [None] * len(weights)
    if batch_first and not packed:
        dx = inputs.new_empty((inputs.shape[1], inputs.shape[0], *inputs.shape[2:])).transpose(0, 1)
    else:
        dx = inputs.new_empty(inputs.shape)
    dcx = None if cx is None else cx.new_empty(cx.shape)
    return dx, hx.new_empty(hx.shape), dcx, _weight_gradients(weights, stride, buffer) if mask[3] else []


def _weight_gradients(weights: Sequence[torch.Tensor], stride: int, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return gradients of the weights, as views of one buffer where the kernel returns views.

    The buffer always has room for biases, so without biases the gradients are copies. If the weights do not lie in the
    buffer, all matrices come before all biases in it.

    Args:
        weights: the weights of all layers.
        stride: the number of weights of a layer in one direction.
        buffer: the buffer of the weights.
    """
    if stride < _WITH_BIASES:
        return [w.new_empty(w.shape) for w in weights]
    storage = buffer.untyped_storage()._cdata
    starts = [w.storage_offset() - buffer.storage_offset() for w in weights]
    if any(w.untyped_storage()._cdata != storage for w in weights):
        order = sorted(range(len(weights)), key=lambda i: weights[i].dim() == 1)
        ends = itertools.accumulate((weights[i].numel() for i in order), initial=0)
        starts = [start for _, start in sorted(zip(order, ends))]
    whole = buffer.new_empty(buffer.shape)
    return [whole[start : start + w.numel()].view(w.shape) for start, w in zip(starts, weights, strict=True)]


_WITH_BIASES = 4
"""Weights of a layer with biases: two matrices and two biases.

A projection adds a third matrix; with it and without biases there are 3, which is still fewer.
"""

_GRU = 3
"""The mode of oneDNN in which two biases for three gates become one bias for four."""

SUBSTITUTES: dict[OpOverload, Callable[..., Any]] = {
    operator.default: substitute
    for name, substitute in (
        ("_grouped_mm", grouped_mm),
        ("_ctc_loss", ctc_loss),
        ("mkldnn_rnn_layer_backward", mkldnn_rnn_layer_backward),
        ("_cudnn_rnn", cudnn_rnn),
        ("_cudnn_rnn_backward", cudnn_rnn_backward),
    )
    if (operator := getattr(aten, name, None)) is not None
}
"""Operator -> the function that makes its outputs under the active fake mode; older PyTorch releases lack some."""

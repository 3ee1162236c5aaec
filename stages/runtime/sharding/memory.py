"""Finds the memory of tensors, and frees the buffers of collectives when these have ended.

A thread of the backend may refer to such a buffer for a while.
"""

from __future__ import annotations

import time

import torch


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an expanded tensor that has each number in memory once."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if size > 1 and not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


PATIENCE_S = 1.0
"""Seconds to wait at most for a backend's thread to let go of a buffer; it takes milliseconds on a busy machine."""


def users_of(tensor: torch.Tensor) -> int:
    """Return how many tensors, of whoever, refer to a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


def alone_with(buffer: torch.Tensor, users: int) -> None:
    """Wait until nobody else refers to a buffer's memory: a thread of the backend may, for a while after it has ended.

    The plan frees the buffer later, and its memory would stay.
    """
    deadline = time.monotonic() + PATIENCE_S
    while buffer.device.type == "cpu" and users_of(buffer) > users and time.monotonic() < deadline:
        time.sleep(1e-4)


def release(buffer: torch.Tensor) -> None:
    """Free the memory of a collective that has ended, although a thread of its backend may refer to it for a while."""
    if buffer.device.type == "cpu":
        buffer.untyped_storage().resize_(0)

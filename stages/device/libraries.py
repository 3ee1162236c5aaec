"""Measures device memory that no tensor shows: workspaces of libraries, and what is outside of the allocator.

cuBLAS takes a workspace for each handle and stream from PyTorch's allocator at the first product and keeps it (some 32
MiB on recent cards); the context, loaded kernels and cuDNN's own handles are outside of the allocator.
"""

from __future__ import annotations

from typing import Any

import torch


def kept_by_libraries(device: torch.device) -> int:
    """Return the bytes that libraries keep, which a process takes once.

    They are what stays allocated after a matrix product of each type and a convolution have run, on a stream where none
    has run before.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(stream):
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.ones(256, 256, device=device, dtype=dtype)
            torch.addmm(a[0], a, a)
            image = torch.ones(1, 8, 16, 16, device=device, dtype=dtype)
            torch.nn.functional.conv2d(image, torch.ones(8, 8, 3, 3, device=device, dtype=dtype))
            del a, image
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def clear_workspaces() -> None:
    """Let cuBLAS give back what it keeps for streams that are no longer used; others take their workspaces again."""
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def outside_the_allocator(device: torch.device) -> int:
    """Return the bytes in use on the card outside of PyTorch's allocator: context, kernels, and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))

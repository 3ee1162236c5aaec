"""Sets PyTorch's allocator on a GPU while plans run."""

from __future__ import annotations

import os
from typing import Any

import torch

SETTING = "expandable_segments:True"
"""Lets blocks grow page by page, so that any pages serve any tensor.

Without it, the allocator does not split a block above 1 MiB unless more than that is left of it, and counts the whole:
a plan's peak would not be the allocator's.
"""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables by which people set the allocator themselves."""


def prepare_allocator(device: torch.device) -> bool:
    """Ask for expandable segments, unless the user has set the allocator; return whether that was done.

    Unused blocks of the other kind are released, so that they do not count besides.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return False
    change: Any = torch.cuda.memory._set_allocator_settings
    change(SETTING)
    torch.cuda.empty_cache()
    return True

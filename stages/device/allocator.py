"""How PyTorch's allocator on a GPU is set while plans run."""

from __future__ import annotations

import os
from typing import Any

import torch

SETTING = "expandable_segments:True"
"""Blocks then grow page by page and any pages serve any tensor. Without, the allocator does not split a block above 1
MiB unless more than that is left of it, and counts the whole: a plan's peak would not be the allocator's."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""By which people set it themselves."""


def prepare_allocator(device: torch.device) -> bool:
    """Ask for expandable segments, unless the user has set the allocator; whether that was done.

    What is held in blocks of the other kind and not in use is given back, so that it does not count beside them.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return False
    change: Any = torch.cuda.memory._set_allocator_settings
    change(SETTING)
    torch.cuda.empty_cache()
    return True

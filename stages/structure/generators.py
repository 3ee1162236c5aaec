"""Restores PyTorch's global random generators after a block of code."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def forked_generators() -> AbstractContextManager[None]:
    """Return a context that restores the random generators of the CPU and of all GPUs when it ends.

    All of them are needed, because `torch.manual_seed` seeds all of them.
    """
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))

"""PyTorch's global generators, left as they were."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def forked_generators() -> AbstractContextManager[None]:
    """A block after which the CPU's generator and those of all GPUs are where they were before: seeding one by
    `torch.manual_seed` seeds all of them."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))

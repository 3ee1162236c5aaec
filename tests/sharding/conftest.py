"""What tests of ranks in this process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def _no_group() -> Iterator[None]:
    """Whatever process group another test of this process has left is gone, and so is what this one leaves."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

"""A plan takes the memory that it says, a limit that just holds it is enough, and what is closed gives back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from stowage.flows.planning.by_rules import Rules
from stowage.stages.device.tiers import PinnedTier
from tests.device.tiers.thread_lanes import ThreadLanes
from tests.gpu.cases import Case, fused
from tests.gpu.limited import train_within
from tests.gpu.side_by_side import differences, plainly, planned

NUMBER, BLOCK = 4, 512
"""Bytes of a number in float32, and of the block that CUDA's allocator takes for it."""


EXPANDABLE = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")


@pytest.mark.apart(**EXPANDABLE)
def test_within_a_limit_that_just_holds_it(device: str, tmp_path: Path) -> None:
    """Tensors ask for no more than the referee says, and for the numbers that stand for what is offloaded: of these the
    CPU's profiler sees new ones come, and not those go that are older than itself. Blocks are hardly larger, and no
    allocation has to give everything cached back first, which halts the device each time."""
    case = Case("llama" if device == "cpu" else "wide llama", device, optimizer=fused)
    expected = plainly(case).losses
    found = train_within(case, tmp_path)
    assert found.losses == expected
    assert found.budget_bytes < 0.75 * found.keep_all_bytes
    stand_ins = found.absent * NUMBER * (2 if device == "cpu" else 1)
    assert 0.5 * found.budget_bytes < found.peak_bytes <= found.budget_bytes + found.unread_bytes + stand_ins
    if device != "cpu":
        most = 1.01 * found.budget_bytes + found.unread_bytes + found.absent * BLOCK
        assert found.allocated_bytes <= most
        assert (found.retries, found.out_of_memory) == (0, 0)


def test_a_second_tier_after_the_first(device: str) -> None:
    """Of the same numbers, in the host memory that the first one gave back."""
    case = Case("llama", device)
    expected = plainly(case)
    gc.collect()
    on_device, pinned = _held(device), [_pinned(device)]
    for _ in range(2):
        tier = PinnedTier(device, lanes=ThreadLanes() if device == "cpu" else None)
        assert differences(planned(case, Rules.stream_all, tier), expected) == []
        assert tier.host_bytes == 0, "closed"
        del tier
        gc.collect()
        pinned.append(_pinned(device))
    assert _held(device) == on_device
    assert pinned[2] <= pinned[1]


def _held(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _pinned(device: str) -> int:
    """Bytes of the host that CUDA's allocator has pinned, in use or not."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if device == "cuda" else 0

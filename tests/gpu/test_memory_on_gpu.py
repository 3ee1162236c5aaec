"""A plan takes the memory that it says, a limit that just holds it is enough, and what is closed gives back."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import PinnedTier
from tests.device.tiers.thread_lanes import ThreadLanes
from tests.gpu.by_hand import Traced
from tests.gpu.cases import Case, fused
from tests.gpu.limited import Held, held
from tests.gpu.side_by_side import differences, plainly, planned

NUMBER, BLOCK = 4, 512
"""Bytes of a number in float32, and of the block that CUDA's allocator takes for it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limited")


@cache
def training(device: str, folder: Path) -> Held:
    """On a GPU of a model whose tensors outweigh what the allocator rounds up."""
    return held("llama" if device == "cpu" else "wide llama", device, folder / device)


def test_no_more_than_predicted(device: str, folder: Path) -> None:
    """Tensors ask for no more than the referee says, and for the numbers that stand for what is below: of these the
    CPU's profiler sees new ones come, and not those go that are older than itself. Blocks are hardly larger."""
    found = training(device, folder)
    assert found.budget_bytes < 0.75 * found.keep_all_bytes
    stand_ins = found.absent * NUMBER * (2 if device == "cpu" else 1)
    assert 0.5 * found.budget_bytes < found.peak_bytes <= found.budget_bytes + found.unread_bytes + stand_ins
    if device != "cpu":
        most = 1.01 * found.budget_bytes + found.unread_bytes + found.absent * BLOCK
        assert found.allocated_bytes <= most


def test_under_a_limit_that_just_holds_it(device: str, folder: Path) -> None:
    """No allocation had to give everything cached back first: that halts the device each time."""
    found = training(device, folder)
    assert found.losses[-1] != found.losses[0]
    if device == "cpu":
        pytest.skip("a CPU has no limit for a process")
    assert (found.retries, found.out_of_memory) == (0, 0)
    assert found.losses == plainly(Case("wide llama", device, optimizer=fused)).losses


def test_a_second_tier_after_the_first(device: str) -> None:
    """Of the same numbers, in the host memory that the first one gave back."""
    case = Case("llama", device)
    expected = plainly(case)
    gc.collect()
    on_device, pinned = _held(device), [_pinned(device)]
    for _ in range(2):
        tier = PinnedTier(device, lanes=ThreadLanes() if device == "cpu" else None)
        assert differences(planned(case, Traced.stream_all, tier), expected) == []
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

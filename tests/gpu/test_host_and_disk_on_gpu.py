"""Host memory and the disk behind it as the lower tier of a GPU: the same bytes, also while long kernels are queued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import HostAndDiskTier, open_tier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostAndDiskTier]:
    made = open_tier("cuda", tmp_path)
    assert isinstance(made, HostAndDiskTier)
    yield made
    made.close()


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("numel", [1, 4095, 1 << 20, (5 << 20) + 77])
def test_round_trips(tier: HostAndDiskTier, numel: int, on_disk: bool) -> None:
    tensor = torch.randn(numel, device="cuda")
    tier.reserve({"a": tensor.nbytes}, ["a"] if on_disk else [])
    tier.offload("a", tensor).wait()
    back = torch.zeros_like(tensor)
    tier.reload("a", back).wait()
    assert torch.equal(tensor, back)


def test_many_steps_with_reused_memory(tier: HostAndDiskTier) -> None:
    """Freed memory is handed out again at once, and long kernels are queued before each copy."""
    size = 1 << 20
    tier.reserve({str(index): 4 * size for index in range(4)}, ["0", "2"])
    matrix = torch.randn(2048, 2048, device="cuda")
    for index in range(20):
        name = str(index % 4)
        for _ in range(5):
            matrix = torch.tanh(matrix @ matrix)
        tensor = torch.full((size,), float(index), device="cuda") + 0 * matrix.sum()
        expected = tensor.clone()
        tier.offload(name, tensor).wait()
        del tensor
        junk = torch.rand(size, device="cuda")
        back = torch.empty(size, device="cuda")
        tier.reload(name, back).wait()
        assert torch.equal(back, expected)
        del junk, back


@pytest.mark.parametrize("on_disk", [True, False])
def test_strides_and_gaps(tier: HostAndDiskTier, on_disk: bool) -> None:
    tier.reserve({"a": 4096}, ["a"] if on_disk else [])
    for one, two in (
        (torch.randn(16, 32, device="cuda").t(), torch.zeros(16, 32, device="cuda").t()),
        (torch.randn(16, 32, device="cuda")[:, ::2], torch.zeros(16, 32, device="cuda")[:, ::2]),
    ):
        tier.offload("a", one).wait()
        tier.reload("a", two).wait()
        assert torch.equal(one, two)


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_cpu_updates_what_is_offloaded(tier: HostAndDiskTier, on_disk: bool) -> None:
    tier.reserve({"a": 4096}, ["a"] if on_disk else [])
    tensor = torch.randn(1024, device="cuda")
    tier.offload("a", tensor).wait()
    content = tier.content("a", torch.empty(1024, device="meta"))
    assert content.device.type == "cpu"
    content += 1
    tier.keep("a", content)
    back = torch.zeros(1024, device="cuda")
    tier.reload("a", back).wait()
    assert torch.equal(back, (tensor.cpu() + 1).cuda())


def test_buffers_are_pinned_and_counted(tier: HostAndDiskTier) -> None:
    assert tier.staging_bytes == 0, "none of the GPU's memory"
    assert tier.host_bytes == 16 << 20

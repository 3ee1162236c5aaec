"""The pinned tier on a GPU: the same bytes, overlapped, and memory that is given back when the plan says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stowage.stages.device.tiers import OFFLOAD, RELOAD, DelayedTier, PinnedTier
from stowage.stages.device.tiers.base import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def tier() -> Iterator[PinnedTier]:
    made = PinnedTier("cuda")
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_round_trips(tier: PinnedTier, dtype: torch.dtype) -> None:
    for index, shape in enumerate([(1,), (4095,), (333, 77), (1 << 20,)]):
        name, tensor = f"{dtype}{index}", (torch.randn(shape, device="cuda") * 100).to(dtype)
        tier.reserve({name: tensor.numel() * tensor.element_size()})
        tier.offload(name, tensor).wait()
        back = torch.zeros_like(tensor)
        tier.reload(name, back).wait()
        assert torch.equal(tensor, back)


@pytest.mark.parametrize("late", [None, OFFLOAD, RELOAD])
def test_many_steps_with_reused_memory(tier: PinnedTier, late: Stream | None) -> None:
    """Freed memory is handed out again at once, and long kernels are queued behind each other."""
    used = tier if late is None else DelayedTier(tier, late, 0.005)
    size, rounds = 1 << 20, 20
    used.reserve({str(index): 4 * size for index in range(4)})
    matrix = torch.randn(2048, 2048, device="cuda")
    for index in range(4):
        tensor = torch.full((size,), float(index), device="cuda")
        used.offload(str(index), tensor).wait()
        del tensor
    for _ in range(rounds):
        for index in range(4):
            matrix = torch.tanh(matrix @ matrix)
            tensor = torch.empty(size, device="cuda")
            used.reload(str(index), tensor).wait()
            tensor.add_(1.0)
            used.offload(str(index), tensor).wait()
            del tensor
            torch.full((size,), -1.0, device="cuda")
    for index in range(4):
        tensor = torch.empty(size, device="cuda")
        used.reload(str(index), tensor).wait()
        assert (tensor == index + rounds).all()


def test_memory_is_free_after_the_wait(tier: PinnedTier) -> None:
    size = 64 << 20
    tier.reserve({"a": size})
    tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    transfer = tier.offload("a", tensor)
    del tensor
    assert torch.cuda.memory_allocated() == before, "held until the wait"
    transfer.wait()
    assert torch.cuda.memory_allocated() == before - size


def test_both_directions_overlap(tier: PinnedTier) -> None:
    size = 256 << 20
    tier.record = True
    tier.reserve({"a": size, "b": size})
    down, up = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    tier.offload("b", up).wait()
    torch.cuda.synchronize()
    transfers = [tier.offload("a", down), tier.reload("b", up)]
    for transfer in transfers:
        transfer.wait()
    torch.cuda.synchronize()
    one, two = tier.spans[-2:]
    assert one.stream != two.stream
    assert max(one.start_s, two.start_s) < min(one.end_s, two.end_s)

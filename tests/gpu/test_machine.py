"""What the code takes for granted about a GPU, each in a test of its own: nothing of it is there on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stowage.flows.benchmarks.gpu.job import GpuJob, limit_memory
from stowage.stages.device import device_of
from stowage.stages.device.rates.host import measure_host_rates
from stowage.stages.device.tiers.host import pinned_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20


def test_the_limit_holds() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 256 * MIB
    try:
        limit_memory(GpuJob("llama", {}, 1, 1, "float32", "cuda", limit, 0))
        kept = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        del kept
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert limit < total


def test_peaks_come_from_the_allocator() -> None:
    def work() -> torch.Tensor:
        first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")

    found = device_of("cuda").measure(work)
    assert (found.peak_bytes, found.end_bytes) == (64 * MIB, 32 * MIB)


def test_times_come_from_the_device() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    device = device_of("cuda")
    device.time_s(lambda: matrix @ matrix)
    one = min(device.time_s(lambda: matrix @ matrix) for _ in range(5))
    four = min(device.time_s(lambda: [matrix @ matrix for _ in range(4)]) for _ in range(5))
    assert 3.0 < four / one < 5.0


def test_rates_of_pinned_memory() -> None:
    rates = measure_host_rates(torch.device("cuda"))
    assert min(rates.offload, rates.reload) > 1e9
    assert rates.duplex > 0.8 * max(rates.offload, rates.reload)
    assert rates.duplex < 1.3 * (rates.offload + rates.reload)
    assert rates.update > 1e8


def test_measuring_leaves_the_generators(tmp_path: object) -> None:
    torch.manual_seed(1)
    expected = torch.rand(2, device="cuda"), torch.rand(2)
    torch.manual_seed(1)
    device_of("cuda").describe(str(tmp_path))
    assert torch.equal(torch.rand(2, device="cuda"), expected[0])
    assert torch.equal(torch.rand(2), expected[1])


def test_where_the_seed_of_fused_attention_is() -> None:
    """The memory-efficient kernel gives seed and offset of its dropout as numbers in the host's memory, its backward
    reads them there; the flash kernel keeps its state on the device. Whoever makes arguments up must do likewise."""
    q = torch.rand(1, 2, 64, 32, device="cuda")
    _, _, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.1, True)
    assert (seed.dtype, seed.device.type, offset.device.type) == (torch.int64, "cpu", "cpu")
    half = q.to(torch.bfloat16)
    found = torch.ops.aten._scaled_dot_product_flash_attention(half, half, half, 0.1, True, False)
    assert found[6].device.type == "cuda"


def test_strict_kernels_repeat() -> None:
    """Fused attention over more tokens than one tile, backward included."""
    torch.use_deterministic_algorithms(True)
    try:
        gradients: list[list[torch.Tensor]] = []
        for _ in range(4):
            q, k, v = (
                torch.rand(2, 2, 512, 32, device="cuda", generator=_seeded(i)).requires_grad_() for i in range(3)
            )
            torch.manual_seed(1)
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, dropout_p=0.1, is_causal=True
                ).sum().backward()
            gradients.append([t.grad for t in (q, k, v) if t.grad is not None])
        assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def test_pinned_memory_comes_in_powers_of_two() -> None:
    """As `host_bytes` counts it."""
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    kept = torch.empty((3 << 20) + 5, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["active_bytes.current"] - before == pinned_bytes(kept.numel())

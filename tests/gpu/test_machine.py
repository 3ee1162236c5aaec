"""What the code takes for granted about a GPU, each in a test of its own."""

from __future__ import annotations

import pytest
import torch

from stowage.flows._gpu_job import Job, limit_memory
from stowage.stages.device import device_of
from stowage.stages.device.host_rates import measure_host_rates
from stowage.stages.runtime.randomness import RandomStates
from stowage.stages.simulate.plan import RANDOM_STATE_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20


def test_the_limit_holds() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 256 * MIB
    try:
        limit_memory(Job("llama", {}, 1, 1, "float32", "cuda", limit, 0))
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


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.native_dropout(x, 0.3, True)[0],
        lambda x: torch.bernoulli(x, 0.5),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
    ],
    ids=["dropout", "bernoulli", "attention"],
)
def test_random_operations_replay(draw: object) -> None:
    assert callable(draw)
    states = RandomStates(torch.device("cuda"))
    x = torch.rand(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    with states.record(0):
        first = draw(x)
    other = draw(x)
    before = torch.cuda.get_rng_state()
    with states.replay(0):
        again = draw(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert states._states[0].nbytes <= RANDOM_STATE_BYTES

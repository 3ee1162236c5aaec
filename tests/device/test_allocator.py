"""The allocator's own events add up to what the arithmetic says."""

from __future__ import annotations

import re
import time

import torch
from torch import nn

from stowage.stages.device import device_of, measure_allocations, unique_bytes
from stowage.stages.device.cpu import CpuDevice

FLOAT = 4


def test_peak_of_a_known_workload() -> None:
    """Three tensors, the second freed before the third is made."""

    def work() -> torch.Tensor:
        one = torch.empty(1000)
        two = torch.empty(5000)
        del two
        torch.empty(2000)
        return one

    measured = measure_allocations(work)
    assert measured.peak_bytes == 6000 * FLOAT
    assert measured.end_bytes == 1000 * FLOAT
    assert [e.nbytes for e in measured.events] == [4000, 20000, -20000, 8000, -8000]
    times = [e.time_s for e in measured.events]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert measured.result.shape == (1000,)


def test_peak_of_forward_and_backward() -> None:
    """x → exp → exp → sum: both results are kept; backward then makes gradients of the same size."""
    n = 10_000
    x = torch.zeros(n, requires_grad=True)

    def forward() -> torch.Tensor:
        return x.exp().exp().sum()

    kept = measure_allocations(forward)
    assert kept.end_bytes == 2 * n * FLOAT + FLOAT
    del kept
    whole = measure_allocations(lambda: forward().backward())  # type: ignore[no-untyped-call]
    assert whole.end_bytes == n * FLOAT, "the gradient stays"
    assert 3 * n * FLOAT <= whole.peak_bytes <= 4 * n * FLOAT + 3 * FLOAT


def test_nothing() -> None:
    measured = measure_allocations(lambda: None)
    assert (measured.events, measured.peak_bytes, measured.end_bytes) == ([], 0, 0)


def test_what_is_freed_inside_and_was_there_before_is_no_peak() -> None:
    held = [torch.empty(1000)]
    measured = measure_allocations(held.clear)
    assert measured.peak_bytes == 0


def test_storages_are_counted_once() -> None:
    whole = torch.empty(10, 10)
    assert unique_bytes([whole, whole[2:], whole.t(), torch.empty(3)]) == 400 + 12
    layer = nn.Linear(4, 4)
    assert unique_bytes([*layer.parameters(), layer.weight]) == 4 * 20


def test_a_device_is_known_by_its_name_threads_and_torch_release() -> None:
    device = device_of("cpu")
    assert isinstance(device, CpuDevice)
    assert re.fullmatch(r"[0-9a-f]{16}", device.fingerprint())
    assert device.fingerprint() == CpuDevice().fingerprint()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        other = device.fingerprint()
    finally:
        torch.set_num_threads(threads)
    assert other != device.fingerprint()


def test_time_is_that_of_the_work() -> None:
    assert device_of("cpu").time_s(lambda: time.sleep(0.02)) >= 0.02


def test_releases_of_older_memory_have_its_size() -> None:
    """Whatever an earlier profile noted at the address: only resident tensors count, with their own sizes."""
    stale = measure_allocations(lambda: [torch.empty(4000) for _ in range(8)]).result
    stale.clear()
    held = {k: torch.empty(1000) for k in range(8)}
    foreign = [torch.empty(1000) for _ in range(8)]

    def work() -> torch.Tensor:
        foreign.clear()
        held.pop(0)
        return torch.empty(500)

    measured = measure_allocations(work, iter(held.values()))
    assert measured.end_bytes in (500 * FLOAT, (500 - 1000) * FLOAT), "the profiler may not see an old release at all"
    assert measured.peak_bytes <= 500 * FLOAT


def test_memory_of_one_profile_released_in_the_next() -> None:
    made = [measure_allocations(lambda: torch.empty(1000)).result]
    measured = measure_allocations(made.clear, iter(made))
    assert measured.end_bytes == -1000 * FLOAT

"""Describes and measures the CPU as the device: the budget limits RAM, and the lower tier is a disk."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from stowage.stages.device.events import Measured, measure_allocations
from stowage.stages.device.rates.disk import measure_disk
from stowage.stages.ir.costs import DeviceDescription

MOST_OTHERS_BYTES = 128 << 20
"""Bytes, more than caches have. Profiling takes so much memory to evict the caches, and releases it."""


def _model_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


class CpuClock:
    """A `Clock` by wall time."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def run(self, work: Callable[[], Any]) -> None:
        """Implement `Clock.run`."""
        start = time.perf_counter()
        work()
        self._seconds.append(time.perf_counter() - start)

    def seconds(self) -> list[float]:
        """Implement `Clock.seconds`."""
        return self._seconds


class CpuDevice:
    """A `Device` whose memory is RAM."""

    def name(self) -> str:
        """Return the processor's name and the number of threads."""
        return f"{_model_name()}, {torch.get_num_threads()} threads"

    def fingerprint(self) -> str:
        """Return a hash of the processor's name, the number of threads, and the torch release."""
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        return hashlib.sha256(f"cpu|{self.name()}|{release}".encode()).hexdigest()[:16]

    def clock(self, calls: int) -> CpuClock:
        """Implement `Device.clock`."""
        del calls
        return CpuClock()

    def time_s(self, work: Callable[[], Any], *, calls: int = 1) -> float:
        """Return the wall time of `work`."""
        del calls
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def evict(self, other_bytes: int) -> None:
        """Write so many bytes, at most `MOST_OTHERS_BYTES`."""
        self._other[: min(other_bytes, MOST_OTHERS_BYTES) // self._other.itemsize].add_(1)

    @cached_property
    def _other(self) -> torch.Tensor:
        # Empty, because pages that are never written take no memory.
        return torch.empty(MOST_OTHERS_BYTES // torch.int32.itemsize, dtype=torch.int32, device="cpu")

    def measure(self, work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
        """Run `work` under the profiler."""
        return measure_allocations(work, resident)

    def _median(self, work: Callable[[], Any], repeat: int = 5) -> float:
        work()
        return sorted(self.time_s(work) for _ in range(repeat))[repeat // 2]

    def describe(self, offload_folder: str) -> DeviceDescription:
        """Measure rates in a few seconds. The global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            return self._describe(offload_folder)

    def _describe(self, offload_folder: str) -> DeviceDescription:
        size = 1024
        a, b = torch.randn(2, size, size, device="cpu")
        big, other = torch.randn(1 << 24, device="cpu"), torch.empty(1 << 24, device="cpu")
        parameter = torch.nn.Parameter(torch.randn(1 << 22, device="cpu"))
        parameter.grad = torch.randn(1 << 22, device="cpu")
        optimizer = torch.optim.AdamW([parameter])
        tiny = torch.zeros(1, device="cpu")
        disk = measure_disk(offload_folder)
        return DeviceDescription(
            fingerprint=self.fingerprint(),
            name=self.name(),
            type="cpu",
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            flops_per_s=2 * size**3 / self._median(lambda: a @ b),
            memory_copy_bytes_per_s=2 * big.nbytes / self._median(lambda: other.copy_(big)),
            disk_read_bytes_per_s=disk.read_bytes_per_s,
            disk_write_bytes_per_s=disk.write_bytes_per_s,
            disk_duplex_bytes_per_s=disk.duplex_bytes_per_s,
            update_bytes_per_s=28 * parameter.numel() / self._median(optimizer.step),
            dispatch_s=self._median(lambda: [torch.ops.aten.view.default(tiny, [1]) for _ in range(1000)]) / 1000,
        )

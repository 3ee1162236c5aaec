"""An NVIDIA GPU as device tier: VRAM under the budget, pinned host memory and disk behind it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from stowage.stages.device.base import MEASURING
from stowage.stages.device.disk import measure_disk
from stowage.stages.device.events import Measured
from stowage.stages.device.host_rates import measure_host_rates
from stowage.stages.ir.costs import DeviceDescription


class CudaDevice:
    """See `Device`. Times come from events; peaks from the caching allocator's statistics."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)

    def name(self) -> str:
        """The card's name."""
        return str(torch.cuda.get_device_name(self._device))

    def fingerprint(self) -> str:
        """Hash of the card's name, the torch release, and how calls are measured."""
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        return hashlib.sha256(f"cuda|{MEASURING}|{self.name()}|{release}".encode()).hexdigest()[:16]

    def time_s(self, work: Callable[[], Any]) -> float:
        """Time between two events around `work`."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def evict(self, other_bytes: int) -> None:
        """Write twice the L2 cache."""
        del other_bytes
        self._other.zero_()

    @cached_property
    def _other(self) -> torch.Tensor:
        size = 2 * torch.cuda.get_device_properties(self._device).L2_cache_size
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def measure(self, work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
        """Run `work`; the allocator keeps totals, so there are no single events."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        began = time.perf_counter()
        result = work()
        torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(self._device) - before
        return Measured(result, [], peak, torch.cuda.memory_allocated(self._device) - before, elapsed)

    def _median(self, work: Callable[[], Any], repeat: int = 9) -> float:
        work()
        return sorted(self.time_s(work) for _ in range(repeat))[repeat // 2]

    def describe(self, offload_folder: str) -> DeviceDescription:
        """Measure rates. The global generators are left as they were."""
        with torch.random.fork_rng(devices=[self._device]):
            return self._describe(offload_folder)

    def _describe(self, offload_folder: str) -> DeviceDescription:
        size = 4096
        a, b = torch.randn(2, size, size, device=self._device)
        big = torch.randn(1 << 26, device=self._device)
        other = torch.empty_like(big)
        parameter = torch.nn.Parameter(torch.randn(1 << 24, device=self._device))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter])
        tiny = torch.zeros(1, device=self._device)
        disk = measure_disk(offload_folder)
        host = measure_host_rates(self._device)
        return DeviceDescription(
            fingerprint=self.fingerprint(),
            name=self.name(),
            type="cuda",
            memory_bytes=torch.cuda.get_device_properties(self._device).total_memory,
            flops_per_s=2 * size**3 / self._median(lambda: a @ b),
            memory_copy_bytes_per_s=2 * big.nbytes / self._median(lambda: other.copy_(big)),
            disk_read_bytes_per_s=disk.read_bytes_per_s,
            disk_write_bytes_per_s=disk.write_bytes_per_s,
            disk_duplex_bytes_per_s=disk.duplex_bytes_per_s,
            update_bytes_per_s=28 * parameter.numel() / self._median(optimizer.step),
            dispatch_s=self._median(lambda: [tiny.add_(1) for _ in range(1000)]) / 1000,
            offload_bytes_per_s=host.offload,
            reload_bytes_per_s=host.reload,
            duplex_bytes_per_s=host.duplex,
            cpu_update_bytes_per_s=host.update,
        )

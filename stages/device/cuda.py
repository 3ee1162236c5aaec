"""Describes and measures an NVIDIA GPU as the device: the lower tier is pinned host memory, a disk, or both."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from stowage.stages.device.events import Measured
from stowage.stages.device.libraries import clear_workspaces, kept_by_libraries, outside_the_allocator
from stowage.stages.device.peaks import Peaks
from stowage.stages.device.rates.disk import measure_disk
from stowage.stages.device.rates.host import give_back_pinned, measure_host_rates
from stowage.stages.device.switches import kernel_switches
from stowage.stages.ir.costs import DeviceDescription

AHEAD_S = 30e-6
"""Seconds for each call that the device waits before the first one.

The host takes less to launch a call, so from then on it is ahead of the device, as it is in a step.
"""

LEAST_AHEAD_S = 200e-6

CYCLES_PER_S = 2.0e9
"""Cycles of about the fastest clock: a wait counted in cycles lasts at least as long as meant on a slower one."""


class CudaClock:
    """A `Clock` of events between the pieces, read at the end; the device starts when the host is ahead."""

    def __init__(self, device: torch.device, calls: int) -> None:
        self._stream: Any = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            wait: Any = torch.cuda._sleep  # type: ignore[no-untyped-call]
            wait(int(max(LEAST_AHEAD_S, calls * AHEAD_S) * CYCLES_PER_S))
        self._spans: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        event: Any = torch.cuda.Event
        made = event(enable_timing=True)
        made.record(self._stream)
        return made

    def run(self, work: Callable[[], Any]) -> None:
        """Implement `Clock.run`."""
        start = self._mark()
        work()
        self._spans.append((start, self._mark()))

    def seconds(self) -> list[float]:
        """Implement `Clock.seconds`."""
        if self._spans:
            self._spans[-1][1].synchronize()
        return [float(start.elapsed_time(end)) * 1e-3 for start, end in self._spans]


class CudaDevice:
    """A `Device` that takes times from events, and peaks from the caching allocator's statistics."""

    def __init__(self, index: int | None = None) -> None:
        """Choose the GPU with this index; None is the current one."""
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def name(self) -> str:
        """Return the card's name."""
        return str(torch.cuda.get_device_name(self._device))

    def fingerprint(self) -> str:
        """Return a hash of the card's name, the torch release, and what chooses kernels."""
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        text = f"cuda|{self.name()}|{release}|{kernel_switches()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def clock(self, calls: int) -> CudaClock:
        """Implement `Device.clock`."""
        return CudaClock(self._device, calls)

    def time_s(self, work: Callable[[], Any], *, calls: int = 1) -> float:
        """Return the time between two events around `work`, queued while the device waits."""
        clock = self.clock(calls)
        clock.run(work)
        return clock.seconds()[0]

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
        peaks = Peaks(self._device)
        before = torch.cuda.memory_allocated(self._device)
        began = time.perf_counter()
        result = work()
        torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - began
        found = peaks.now()
        assert found is not None
        end = torch.cuda.memory_allocated(self._device) - before
        return Measured(result, [], found.allocated_bytes - before, end, elapsed, found)

    def _median(self, work: Callable[[], Any], repeat: int = 9, *, calls: int = 1) -> float:
        work()
        return sorted(self.time_s(work, calls=calls) for _ in range(repeat))[repeat // 2]

    def describe(self, offload_folder: str) -> DeviceDescription:
        """Measure rates. The global generators are left as they were, and memory is given back."""
        try:
            with torch.random.fork_rng(devices=[self._device]), torch.cuda.device(self._device):
                return self._describe(offload_folder)
        finally:
            clear_workspaces()
            torch.cuda.empty_cache()
            give_back_pinned()

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
            update_bytes_per_s=28 * parameter.numel() / self._median(optimizer.step, calls=20),
            dispatch_s=self._median(lambda: [tiny.add_(1) for _ in range(1000)], calls=1000) / 1000,
            offload_bytes_per_s=host.offload,
            reload_bytes_per_s=host.reload,
            duplex_bytes_per_s=host.duplex,
            cpu_update_bytes_per_s=host.update,
            library_bytes=max(1, kept_by_libraries(self._device)),  # 0 marks a card that was not asked
            context_bytes=outside_the_allocator(self._device),
        )

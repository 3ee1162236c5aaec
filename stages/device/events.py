"""Reads the memory of a piece of work as the allocator saw it: every allocation and release, in order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from stowage.stages.device.native_log import without_native_warnings
from stowage.stages.device.peaks import AllocatorPeaks
from stowage.stages.ir.machine import DISK_ALIGNMENT_BYTES

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or else the profiler prints two lines each time


@dataclass(frozen=True)
class AllocatorEvent:
    """One allocation or release: seconds since the start of the work, and bytes, negative for a release."""

    time_s: float
    nbytes: int


@dataclass(frozen=True)
class Measured:
    """The memory that a piece of work took, and its result.

    Attributes:
        result: the result of the work.
        events: the allocator's events, in order.
        peak_bytes: highest sum of events, from 0 at the start.
        end_bytes: sum of all events.
        elapsed_s: wall time of the work itself, without what starting and reading the profiler takes.
        allocator: on a GPU, its allocator's peaks during the work, everything in the process included.
    """

    result: Any
    events: list[AllocatorEvent]
    peak_bytes: int
    end_bytes: int
    elapsed_s: float
    allocator: AllocatorPeaks | None = None


ALLOCATOR_ALIGNMENT = 64
"""Divides every address that PyTorch's allocator gives."""

RELEASE = "stowage.release"
"""Name of a mark in the profile for memory that is released; its address and its bytes follow."""


def measure_allocations(work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
    """Run `work` on the CPU under the profiler and read the allocator's own events.

    The profiler does not know the sizes of memory that existed before: a release of such memory counts if it is of a
    `resident` tensor, with that tensor's size. If the profiler may miss the release, `work` can mark it, see `RELEASE`.
    """
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in resident}
    # The profiler warns in each run that it knows no size of memory that existed before.
    with (
        without_native_warnings(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler,
    ):
        began = time.perf_counter()
        result = work()
        elapsed = time.perf_counter() - began
    found: list[tuple[int, int]] = []
    for start_ns, address, nbytes in sorted(_seen(profiler), key=lambda seen: seen[0]):
        if nbytes > 0:
            sizes[address] = nbytes
            found.append((start_ns, nbytes))
            continue
        start = _start_of(address, -nbytes, sizes)
        if start is not None:
            found.append((start_ns, -sizes.pop(start)))
    start = found[0][0] if found else 0
    used = peak = 0
    for _, nbytes in found:
        used += nbytes
        peak = max(peak, used)
    events = [AllocatorEvent((ns - start) * 1e-9, nbytes) for ns, nbytes in found]
    return Measured(result, events, peak, used, elapsed)


def noted_release(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Tell a profiler what memory is released inside: it does not see the release of memory older than itself."""
    if not torch._C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    storage = tensor.untyped_storage()
    mark: contextlib.AbstractContextManager[Any] = torch.autograd.profiler.record_function(
        f"{RELEASE} {storage.data_ptr()} {storage.nbytes()}"
    )
    return mark


def _start_of(address: int, nbytes: int, sizes: Mapping[int, int]) -> int | None:
    """Return the address at which released memory was taken, if it is known.

    Tensors from a disk begin a little after it, see `DISK_ALIGNMENT_BYTES`.
    """
    if address in sizes:
        return address
    before = range(address - ALLOCATOR_ALIGNMENT, address - DISK_ALIGNMENT_BYTES - 1, -ALLOCATOR_ALIGNMENT)
    return next((a for a in before if sizes.get(a) == nbytes + DISK_ALIGNMENT_BYTES), None)


def _seen(profiler: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the time in ns, the address, and the bytes taken; a release has -1, or minus its bytes if it was marked."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            memory = event.extra_fields
            yield event.start_time_ns, memory.ptr, memory.alloc_size if memory.alloc_size > 0 else -1
        elif event.name.startswith(RELEASE):
            address, nbytes = map(int, event.name.split()[1:])
            yield event.start_time_ns, address, -nbytes


def unique_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())

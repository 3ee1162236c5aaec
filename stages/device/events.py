"""Memory of a piece of work as the allocator saw it: every allocation and release, in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints two lines each time


@dataclass(frozen=True)
class AllocatorEvent:
    """Seconds since the start of the work, and the bytes taken (positive) or given back (negative)."""

    time_s: float
    nbytes: int


@dataclass(frozen=True)
class Measured:
    """What a piece of work did to memory.

    Attributes:
        result: what it returned.
        events: of the allocator, in order.
        peak_bytes: highest sum of events, from 0 at the start.
        end_bytes: sum of all events.
        elapsed_s: wall time of the work itself, without what starting and reading the profiler takes.
    """

    result: Any
    events: list[AllocatorEvent]
    peak_bytes: int
    end_bytes: int
    elapsed_s: float


RELEASE = "stowage.release"
"""Name of a mark in the profile: memory at an address (first word after it) of so many bytes (second) goes away."""


def measure_allocations(work: Callable[[], Any], resident: Iterable[torch.Tensor] = ()) -> Measured:
    """Run `work` on the CPU under the profiler and read the allocator's own events.

    The profiler does not see the release of memory that existed before: of `resident` tensors it counts when `work`
    marks it, see `RELEASE`.
    """
    before = {t.untyped_storage().data_ptr() for t in resident}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        began = time.perf_counter()
        result = work()
        elapsed = time.perf_counter() - began
    kineto: Any = profiler.profiler
    found: list[tuple[int, int]] = []
    for event in sorted(kineto.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            found.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(RELEASE):
            address, nbytes = map(int, event.name().split()[1:])
            if address in before:
                before.discard(address)
                found.append((event.start_ns(), -nbytes))
    start = found[0][0] if found else 0
    used = peak = 0
    for _, nbytes in found:
        used += nbytes
        peak = max(peak, used)
    events = [AllocatorEvent((ns - start) * 1e-9, nbytes) for ns, nbytes in found]
    return Measured(result, events, peak, used, elapsed)


def unique_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())

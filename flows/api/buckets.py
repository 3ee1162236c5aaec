"""Chooses how many bytes of small weights are gathered together: latency against memory.

Every collective takes some time to begin. Weights that are gathered together pay it once, and are in memory together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stowage.flows.planning.planned import Planned
from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.ir.errors import Infeasible
from stowage.stages.trace import MicroBatch

LEAST_BYTES, MOST_BYTES = 64 << 10, 64 << 20

FACTORS = (4, 1)
"""Sizes that are tried, in the bytes that a collective transfers while another begins."""

NEAR = 1.02
"""Factor of the lower bound within which no other size is tried."""


def bucket_sizes(rates: CollectiveRates, ranks: int) -> list[int]:
    """Return the sizes to try, the most promising first."""
    begun = rates.start_s * rates.bytes_per_s * ranks / (ranks - 1)
    sizes = (1 << max(int(begun * factor), 1).bit_length() for factor in FACTORS)
    return list(dict.fromkeys(min(max(size, LEAST_BYTES), MOST_BYTES) for size in sizes))


def plan_by_buckets(
    plan: Callable[[MicroBatch], Planned], micro_batch: MicroBatch, sizes: list[int]
) -> tuple[Planned, int]:
    """Plan with buckets of several sizes until one is nearly as fast as can be; return the fastest, and its size.

    Raises:
        Infeasible: the budget can be met with none; the one that needs least is reported.
    """
    found: list[tuple[Planned, int]] = []
    failures: list[Infeasible] = []
    for size in sizes:
        try:
            found.append((plan(replace(micro_batch, bucket_bytes=size)), size))
        except Infeasible as failure:
            failures.append(failure)
            continue
        summary = found[-1][0].summary
        if summary.step_time_s <= NEAR * summary.lower_bound_s:
            break
    if not found:
        raise min(failures, key=lambda f: f.smallest_feasible_bytes)
    return min(found, key=lambda pair: pair[0].summary.step_time_s)

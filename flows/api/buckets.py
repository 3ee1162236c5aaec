"""Chooses how many bytes of small weights are gathered together: latency against memory.

Every collective takes some time to begin. Weights that are gathered together pay it once, and are in memory together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from stowage.flows.planning.planned import Planned
from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.ir.errors import NO_PLAN, Infeasible, NoRoomInLowerTier
from stowage.stages.rewrite.buckets import block_of
from stowage.stages.trace import MicroBatch

LEAST_BYTES, MOST_BYTES = 64 << 10, 64 << 20

FACTORS = (4, 1)
"""Sizes that are tried, in the bytes that a collective transfers while another begins."""

SMALLER = 4
"""Where all of these hold a whole block, one that is so many times smaller than a block is tried too."""

NEAR = 1.02
"""Factor of the lower bound within which no other size is tried, where planning may take its time."""


def bucket_sizes(rates: CollectiveRates, ranks: int, block_bytes: int) -> list[int]:
    """Return the sizes to try in bytes, the most promising first.

    Args:
        rates: what collectives take.
        ranks: how many ranks there are, at least 2.
        block_bytes: bytes of the largest block of the model: no bucket holds weights of two.
    """
    begun = rates.start_s * rates.bytes_per_s * ranks / (ranks - 1)
    most = min(max(_power(block_bytes), LEAST_BYTES), MOST_BYTES)
    sizes = list(dict.fromkeys(min(max(_power(begun * factor), LEAST_BYTES), most) for factor in FACTORS))
    if sizes == [most]:
        sizes.append(max(most // SMALLER, LEAST_BYTES))
    return list(dict.fromkeys(sizes))


def _power(nbytes: float) -> int:
    """Return a power of two of at least so many bytes."""
    return 1 << max(int(nbytes), 1).bit_length()


def largest_block_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters of the block of a model that has most."""
    blocks: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        blocks[block_of(name.rpartition(".")[0])] += parameter.nbytes
    return max(blocks.values(), default=0)


def plan_by_buckets(
    plan: Callable[[MicroBatch], Planned], micro_batch: MicroBatch, sizes: list[int], near: float = NEAR
) -> tuple[Planned, int]:
    """Plan with buckets of several sizes until one is nearly as fast as can be; return the fastest, and its size.

    Args:
        plan: makes the plan of a micro-batch.
        micro_batch: the micro-batch.
        sizes: bytes of a bucket, the most promising first.
        near: factor of the lower bound within which no other size is tried.

    Raises:
        Infeasible: the budget can be met with none; the one that needs least is reported.
    """
    found: list[tuple[Planned, int]] = []
    failures: list[Infeasible | NoRoomInLowerTier] = []
    for size in sizes:
        try:
            found.append((plan(replace(micro_batch, bucket_bytes=size)), size))
        except NO_PLAN as failure:
            failures.append(failure)
            continue
        summary = found[-1][0].summary
        if summary.step_time_s <= near * summary.lower_bound_s:
            break
    if not found:
        raise min(failures, key=lambda f: f.smallest_feasible_bytes)
    return min(found, key=lambda pair: pair[0].summary.step_time_s)

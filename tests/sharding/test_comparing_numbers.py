"""What ranks compare takes no memory that the plan does not know of, however often they do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stowage.stages.device import device_of
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.sharding.processes import on_ranks

COMPARED = 60


def test_comparisons_leave_nothing_behind() -> None:
    """Gloo lets go of what it has sent a little late, so that new memory for each would add up."""
    for equal, peak_bytes in on_ranks(2, compare):
        assert equal == [True, False] * (COMPARED // 2)
        assert peak_bytes <= 16  # of the comparison itself


def compare() -> tuple[list[bool], int]:
    ranks, rank = Ranks(dist.group.WORLD), dist.get_rank()
    assert ranks.same(3, "a number")
    found: list[bool] = []

    def work() -> None:
        found.extend(ranks.same(number if number % 2 == 0 else number + rank, "a number") for number in range(COMPARED))

    return found, device_of(torch.device("cpu")).measure(work, []).peak_bytes

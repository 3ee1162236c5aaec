"""The helper that starts ranks: results in their order, errors with the rank that raised them, nothing that hangs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.sharding.processes import on_ranks, outcomes


def _sum(number: int) -> tuple[int, float]:
    tensor = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


def _one_raises() -> float:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    tensor = torch.ones(())
    dist.all_reduce(tensor)
    return tensor.item()


def test_every_rank_returns_its_result() -> None:
    assert on_ranks(2, _sum, 3) == [(0, 7.0), (1, 7.0)]


def test_a_rank_that_raises_fails_the_test_with_its_error_and_nobody_hangs() -> None:
    first, second = outcomes(2, _one_raises, collective_s=5)
    assert second.error == "ValueError: rank 1 has had enough"
    assert first.error
    assert first.took_s < 60
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        on_ranks(2, _one_raises)

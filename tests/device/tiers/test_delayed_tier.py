"""The delayed tier: with every wait in place nothing changes; each missing wait shows in the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import OFFLOAD, RELOAD, DelayedTier, DiskTier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.errors import IllegalPlanError
from tests.device.tiers.moving import random_bytes

LATE_S = 0.05
NAMES = ("a", "b", "c")


@pytest.fixture(params=[OFFLOAD, RELOAD])
def stream(request: pytest.FixtureRequest) -> Stream:
    value: Stream = request.param
    return value


@pytest.fixture
def tier(tmp_path: Path, stream: Stream) -> Iterator[DelayedTier]:
    made = DelayedTier(DiskTier(tmp_path), stream, LATE_S)
    made.reserve(dict.fromkeys(NAMES, 4000))
    yield made
    made.close()


def test_with_all_waits_it_is_exact(tier: DelayedTier) -> None:
    for seed in range(3):
        tensor = random_bytes(4000, seed)
        tier.offload("a", tensor).wait()
        tensor.zero_()
        assert tier.written("a")
        tier.reload("a", tensor).wait()
        assert torch.equal(tensor, random_bytes(4000, seed))
    assert (tier.name, tier.staging_bytes) == ("disk", 16 << 20)


def test_order_within_a_slot_is_kept(tier: DelayedTier) -> None:
    """Without a wait in between: each reload has the bytes of its turn, whichever stream is late."""
    backs, transfers = [], []
    for seed in range(3):
        for name in NAMES[:2]:
            transfers.append(tier.offload(name, random_bytes(4000, seed)))
            assert tier.written(name)
            backs.append((seed, torch.zeros(4000, dtype=torch.uint8)))
            transfers.append(tier.reload(name, backs[-1][1]))
    for transfer in transfers:
        transfer.wait()
        assert transfer.done()
    assert all(torch.equal(back, random_bytes(4000, seed)) for seed, back in backs)


def test_order_within_a_stream_is_kept(tier: DelayedTier) -> None:
    tier.record = True
    for name in NAMES:
        tier.offload(name, random_bytes(4000))
    up = [tier.reload(name, random_bytes(4000)) for name in NAMES]
    for transfer in up:
        transfer.wait()
    for each in (OFFLOAD, RELOAD):
        assert [span.name for span in tier.spans if span.stream == each] == list(NAMES)


@pytest.mark.parametrize("tensor", [torch.ones(1000), torch.ones(20, 100)[:, ::2], torch.ones(10, dtype=torch.int64)])
def test_a_missing_wait_after_a_reload_shows(tmp_path: Path, tensor: torch.Tensor) -> None:
    tier = DelayedTier(DiskTier(tmp_path), RELOAD, LATE_S)
    tier.reserve({"a": 4000})
    tier.offload("a", tensor).wait()
    back = torch.zeros_like(tensor)
    transfer = tier.reload("a", back)
    assert not transfer.done()
    assert not (back == tensor).any()
    transfer.wait()
    assert torch.equal(back, tensor)
    tier.close()


def test_a_missing_wait_after_an_offload_shows(tmp_path: Path) -> None:
    """The tensor is changed while its copy has not begun: the slot gets the bytes of later."""
    tier = DelayedTier(DiskTier(tmp_path), OFFLOAD, LATE_S)
    tier.reserve({"a": 4000})
    tensor = torch.ones(1000)
    tier.offload("a", tensor)
    tensor.fill_(2.0)
    back = torch.zeros(1000)
    tier.reload("a", back).wait()
    assert (back == 2.0).all()
    tier.close()


def test_the_other_stream_is_not_late(tmp_path: Path) -> None:
    tier = DelayedTier(DiskTier(tmp_path), OFFLOAD, 30.0)
    tier.reserve({"a": 4, "b": 4})
    inner = tier.inner
    inner.offload("a", torch.ones(1)).wait()
    late = tier.offload("b", torch.ones(1))
    back = torch.zeros(1)
    tier.reload("a", back).wait()
    assert back == 1
    assert not late.done()
    del late


def test_a_mistake_is_said_at_the_wait(tmp_path: Path) -> None:
    tier = DelayedTier(DiskTier(tmp_path), RELOAD, LATE_S)
    transfer = tier.reload("a", torch.zeros(1))
    with pytest.raises(IllegalPlanError, match="not reserved"):
        transfer.wait()
    assert transfer.done()
    tier.close()


def test_closing_does_not_wait_for_the_delay(tmp_path: Path) -> None:
    tier = DelayedTier(DiskTier(tmp_path), OFFLOAD, LATE_S)
    tier.reserve({"a": 4})
    transfers = [tier.offload("a", torch.ones(1)) for _ in range(100)]
    tier.close()
    assert all(transfer.done() for transfer in transfers)

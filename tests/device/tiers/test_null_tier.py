"""The null tier: every mistake in the order of verbs is said, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stowage.stages.device.tiers import NullTier
from stowage.stages.device.tiers.null import Verb
from stowage.stages.ir.errors import IllegalPlanError


@pytest.fixture
def tier() -> NullTier:
    made = NullTier()
    made.reserve({"a": 16, "b": 16})
    return made


def test_what_is_legal(tier: NullTier) -> None:
    first, second = torch.arange(4.0), torch.arange(4.0) + 10
    one, two = tier.offload("a", first), tier.offload("b", second)
    assert tier.unwaited == ["a", "b"]
    assert not one.done()
    one.wait()
    assert one.done()
    first.zero_()
    two.wait()
    up = tier.reload("a", first)
    up.wait()
    assert torch.equal(first, torch.arange(4.0))
    assert tier.unwaited == []
    assert [(verb.verb, verb.name) for verb in tier.verbs] == [
        *(("offload", "a"), ("offload", "b"), ("wait", "a"), ("wait", "b"), ("reload", "a"), ("wait", "a"))
    ]
    assert tier.verbs[0] == Verb("offload", "a", 16)
    assert (tier.staging_bytes, list(tier.spans)) == (0, [])
    tier.close()


def test_a_reload_takes_what_was_offloaded_at_its_time(tier: NullTier) -> None:
    tier.offload("a", torch.ones(4)).wait()
    back = torch.zeros(4)
    up = tier.reload("a", back)
    tier.offload("a", torch.full((4,), 2.0)).wait()
    up.wait()
    assert torch.equal(back, torch.ones(4))


def test_strides_and_gaps(tier: NullTier) -> None:
    tier.reserve({"c": 96})
    for make in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3]):
        one, two = make(torch.randn(4, 6)), make(torch.zeros(4, 6))
        tier.offload("c", one).wait()
        tier.reload("c", two).wait()
        assert torch.equal(one, two)


def test_reading_before_the_wait_gives_garbage(tier: NullTier) -> None:
    tier.offload("a", torch.ones(4)).wait()
    back = torch.zeros(4)
    up = tier.reload("a", back)
    assert back.isnan().all()
    up.wait()
    assert torch.equal(back, torch.ones(4))
    quiet = NullTier(garbage=False)
    quiet.reserve({"a": 16})
    quiet.offload("a", torch.ones(4)).wait()
    quiet.reload("a", back.zero_())
    assert not back.isnan().any()


def offloaded(tier: NullTier) -> torch.Tensor:
    tensor = torch.ones(4)
    tier.offload("a", tensor).wait()
    return tensor


def waiting_without_a_transfer(tier: NullTier) -> None:
    tier.wait("a")


def waiting_twice(tier: NullTier) -> None:
    transfer = tier.offload("a", torch.ones(4))
    tier.wait("a")
    transfer.wait()


def reloading_what_was_never_offloaded(tier: NullTier) -> None:
    tier.reload("a", torch.ones(4))


def writing_before_the_offload_is_complete(tier: NullTier) -> None:
    tensor = torch.ones(4)
    transfer = tier.offload("a", tensor)
    tensor.mul_(2)
    transfer.wait()


def freeing_before_the_offload_is_complete(tier: NullTier) -> None:
    tensor = torch.ones(4)
    transfer = tier.offload("a", tensor)
    tensor.untyped_storage().resize_(0)
    transfer.wait()


def freeing_before_the_offload_starts(tier: NullTier) -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    tier.offload("a", tensor)


def writing_before_the_reload_is_complete(tier: NullTier) -> None:
    tensor = offloaded(tier)
    transfer = tier.reload("a", tensor)
    tensor[0] = 5
    transfer.wait()


def offloading_what_is_not_there_yet(tier: NullTier) -> None:
    tensor = offloaded(tier)
    tier.reload("a", tensor)
    tier.offload("b", tensor)


def reloading_over_what_is_still_offloaded(tier: NullTier) -> None:
    tensor = offloaded(tier)
    tier.offload("b", tensor)
    tier.reload("a", tensor[1:2].as_strided((4,), (1,), 0))


def reloading_twice_into_one_place(tier: NullTier) -> None:
    tensor = offloaded(tier)
    tier.reload("a", tensor)
    tier.reload("a", tensor)


def a_slot_that_is_too_small(tier: NullTier) -> None:
    tier.offload("a", torch.ones(5))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (waiting_without_a_transfer, "Wait for 'a': no transfer"),
        (waiting_twice, "Wait for 'a': no transfer"),
        (reloading_what_was_never_offloaded, "Reload of 'a': it was never offloaded"),
        (writing_before_the_offload_is_complete, "'a' was written before the wait for its offload"),
        (freeing_before_the_offload_is_complete, "'a' was freed before the wait for its offload"),
        (freeing_before_the_offload_starts, "'a' was freed"),
        (writing_before_the_reload_is_complete, "'a' was written before the wait for its reload"),
        (offloading_what_is_not_there_yet, "Offload of 'b': the reload of 'a' in the same memory was not waited for"),
        (reloading_over_what_is_still_offloaded, "Reload of 'a': the offload of 'b' in the same memory"),
        (reloading_twice_into_one_place, "Reload of 'a': the reload of 'a' in the same memory"),
        (a_slot_that_is_too_small, "20 bytes do not fit its slot of 16"),
    ],
)
def test_mistakes(tier: NullTier, mistake: Callable[[NullTier], None], sentence: str) -> None:
    with pytest.raises(IllegalPlanError, match=sentence):
        mistake(tier)

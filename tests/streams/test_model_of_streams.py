"""The model of a device itself: it reuses memory, poisons what was never written, and finds what is wrong by clocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stowage.stages.device.tiers import PinnedTier
from tests.streams.checking import in_random_order, preferring
from tests.streams.device_mode import DeviceMode
from tests.streams.machine import Machine

CPU = torch.device("cpu")


def lines(machine: Machine) -> list[str]:
    """What it found."""
    machine.drain()
    return [*map(str, machine.shadow.races), *machine.unwritten]


def test_freed_memory_is_there_again_at_once() -> None:
    machine = preferring(("compute",))
    with DeviceMode(machine):
        one = torch.full((64,), 3.0, device=CPU)
        address = one.data_ptr()
        del one
        two = torch.empty(64, device=CPU)
        assert two.data_ptr() == address
        three = torch.empty(64, device=CPU)
    machine.drain()
    assert (two == 3).all(), "what was there before"
    assert three.isnan().all(), "never written"


def test_nothing_is_done_before_it_is_asked_for() -> None:
    machine = preferring(("compute",))
    with DeviceMode(machine):
        one = torch.full((4,), 2.0, device=CPU)
        two = one.view(2, 2).t().add(1)
        assert len(machine.queues["compute"]) > 0
        assert float(two[0, 0]) == 3
        assert not machine.queues["compute"]


@pytest.mark.parametrize("seed", range(4))
def test_random_numbers_are_those_of_the_call(seed: int) -> None:
    """However late a kernel runs, it draws from where the generator was when it was called."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = [torch.empty(8).bernoulli_(0.5), torch.rand(3), torch.randn(2)]
        after = torch.get_rng_state()
        torch.manual_seed(3)
        machine = in_random_order(seed)
        with DeviceMode(machine):
            found = [torch.empty(8, device=CPU).bernoulli_(0.5), torch.rand(3, device=CPU), torch.randn(2, device=CPU)]
            assert torch.equal(torch.get_rng_state(), after)
        machine.drain()
        assert all(map(torch.equal, found, expected))


def read_before_written(tier: PinnedTier) -> None:
    torch.empty(4, device=CPU).add(1)


def read_before_its_copy(tier: PinnedTier) -> None:
    tier.offload("a", torch.ones(4, device=CPU)).wait()
    back = torch.empty(4, device=CPU)
    transfer = tier.reload("a", back)
    back.add(1)
    transfer.wait()


def written_under_way(tier: PinnedTier) -> None:
    one = torch.ones(4, device=CPU)
    transfer = tier.offload("a", one)
    one.add_(1)
    transfer.wait()


def freed_under_way(tier: PinnedTier) -> None:
    one = torch.ones(4, device=CPU)
    tier.offload("a", one)._tensors = ()
    del one


def right(tier: PinnedTier) -> None:
    one = torch.ones(4, device=CPU)
    tier.offload("a", one).wait()
    one.add_(1)
    back = torch.empty(4, device=CPU)
    tier.reload("a", back).wait()
    back.add_(1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (read_before_written, "read before anything was written"),
        (read_before_its_copy, "compute reads it"),
        (written_under_way, "compute writes it"),
        (freed_under_way, "compute frees it"),
        (right, ""),
    ],
)
def test_what_is_wrong_is_found_in_every_order(program: Callable[[PinnedTier], None], expected: str, seed: int) -> None:
    machine = in_random_order(seed)
    tier = PinnedTier(lanes=machine)
    tier.reserve({"a": 16})
    with DeviceMode(machine):
        program(tier)
    found = lines(machine)
    assert any(expected in text for text in found) if expected else found == []

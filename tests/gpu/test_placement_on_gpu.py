"""Where things are made: on the device of the model, whichever is the first one or the default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stowage.flows.planning.by_rules import Rules
from stowage.stages.device import device_of
from stowage.stages.device.rates.disk import measure_disk
from stowage.stages.device.tiers import HostAndDiskTier, Tier, open_tier
from stowage.stages.runtime.observe.measure import measure_program
from tests.gpu.cases import Case, fused
from tests.gpu.profiling import profile
from tests.gpu.side_by_side import SEED, STEPS, Planned, a_tier, differences, plainly, planned


@contextmanager
def another_default(device: str) -> Iterator[None]:
    """New tensors are on a GPU unless told otherwise, as many scripts have it. For a model on the CPU they are on the
    meta device: what forgets to say where it wants a tensor then finds one without memory."""
    torch.set_default_device("cuda" if device != "cpu" else "meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("cpu_updates", [False, True], ids=["device", "cpu"])
def test_training_on_any_device(cpu_updates: bool, place: str) -> None:
    """Also on a second GPU, while the first one stays the current one."""
    case = Case("gpt2", place, optimizer=fused)
    expected = plainly(case)
    found = planned(case, lambda one: one.stream_all(cpu_updates=cpu_updates), a_tier(place))
    if cpu_updates and place != "cpu":
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    else:
        assert differences(found, expected) == []


def test_measured_on_any_device(place: str) -> None:
    """Peaks are those of the model's device."""
    training = Planned(Case("gpt2", place), Rules.keep_all)
    training.step()
    found = measure_program(training.programs[0], training.model, training.optimizer, training.batches[0])
    assert found.peak_bytes > found.resident_bytes + 100_000


@pytest.mark.parametrize("cpu_updates", [False, True], ids=["device", "cpu"])
def test_steps_under_another_default(cpu_updates: bool, device: str, tmp_path: Path) -> None:
    """Opening the tier, moving, updating, and what a step makes."""
    case = Case("gpt2", device, optimizer=fused)
    expected = plainly(case)
    with another_default(device):
        tier = open_tier(device, tmp_path)
    training = Planned(case, lambda one: one.stream_all(cpu_updates=cpu_updates), tier)
    torch.manual_seed(SEED)
    with another_default(device):
        losses = [loss for _ in range(STEPS) for loss in training.step()]
        training.offloading.fetch_all()  # type: ignore[union-attr]
        tier.close()
    found = training.trained(losses)
    if cpu_updates and device != "cpu":
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    else:
        assert differences(found, expected) == []


def test_a_tier_under_another_default(device: str, tmp_path: Path) -> None:
    """Host memory is in the host, and what the CPU works on too."""
    with another_default(device):
        tier = open_tier(device, tmp_path)
        _round_trips(tier, device)
        tier.close()


def _round_trips(tier: Tier, device: str) -> None:
    tensor = torch.arange(4096.0, device=device)
    on_disk = ["a"] if isinstance(tier, HostAndDiskTier) else []
    tier.reserve({"a": tensor.nbytes, "b": tensor.nbytes}, on_disk)
    for name in ("a", "b"):
        tier.offload(name, tensor).wait()
        back = torch.zeros_like(tensor)
        tier.reload(name, back).wait()
        assert torch.equal(back, tensor)
        content = tier.content(name, torch.empty(4096, device="meta"))  # type: ignore[attr-defined]
        assert content.device.type == "cpu"
        assert torch.equal(content, tensor.cpu())


def test_rates_under_another_default(device: str, tmp_path: Path) -> None:
    with another_default(device):
        assert measure_disk(str(tmp_path)).write_bytes_per_s > 1e6
        if device == "cuda":
            assert device_of(device).describe(str(tmp_path)).cpu_update_bytes_per_s > 1e8


@pytest.mark.apart
def test_profiles_under_another_default(device: str, tmp_path: Path) -> None:
    if device == "cpu":
        pytest.skip("a model's own code may make tensors where the default is, as it would in eager")
    with another_default(device):
        assert profile(Case("llama", device), tmp_path).costs

"""Copies that come late, and computing that comes late: a missing wait shows as other numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from stowage.flows.benchmarks.gpu.lanes import Late, LateCudaLanes, late_lanes
from stowage.flows.planning.by_rules import Rules
from stowage.stages.device.tiers import PinnedTier
from stowage.stages.device.tiers.host import _PinnedTransfer
from tests.gpu.cases import Case, fused
from tests.gpu.side_by_side import assert_close, differences, plainly, planned

LATE: tuple[Late, ...] = ("offload", "reload", "compute")
LATE_S = {"cpu": 5e-4, "cuda": 1e-3}

tight = partial(Rules.stream_all, ahead=1, lag=0)
cpu_updates = partial(Rules.stream_all, ahead=1, lag=0, cpu_updates=True)


def late_tier(device: str, late: Late) -> PinnedTier:
    """Host memory as the lower tier, with one stream that lags behind."""
    return PinnedTier(device, lanes=late_lanes(device, (late,), LATE_S[device]))


def case_of(model: str, device: str) -> Case:
    if model == "wide llama" and device == "cpu":
        pytest.skip("takes minutes")
    return Case(model, device, optimizer=fused)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("model", ["gpt2", "wide llama"])
def test_streamed_weights(model: str, late: Late, device: str) -> None:
    case = case_of(model, device)
    assert differences(planned(case, tight, late_tier(device, late), 2), plainly(case, 2)) == []


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("model", ["llama", "wide llama"])
def test_updates_by_the_cpu(model: str, late: Late, device: str) -> None:
    case = case_of(model, device)
    assert_close(case, planned(case, cpu_updates, late_tier(device, late), 3), plainly(case, 3))


@pytest.mark.parametrize("late", LATE)
def test_gradients_that_wait(late: Late, device: str) -> None:
    case = Case("llama", device, micro_batches=2)
    assert differences(planned(case, tight, late_tier(device, late), 2), plainly(case, 2)) == []


def test_a_missing_wait_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were nothing to wait for reloads, these tests would tell."""
    honest = _PinnedTransfer.wait

    def wait(transfer: Any) -> None:
        if transfer._stream != "reload":
            honest(transfer)

    case = Case("gpt2", device)
    expected = plainly(case, 2)
    monkeypatch.setattr(_PinnedTransfer, "wait", wait)
    assert differences(planned(case, tight, late_tier(device, "reload"), 2), expected) != []


def test_a_copy_too_early_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were copies not to wait for what is computed, they would take what was there before."""
    if device == "cpu":
        pytest.skip("computing is the caller's there: it is never behind")
    honest = LateCudaLanes.wait

    def wait(lanes: Any, stream: Any, event: Any) -> None:
        if stream not in lanes._sides.values():
            honest(lanes, stream, event)

    case = Case("gpt2", device)
    expected = plainly(case, 2)
    monkeypatch.setattr(LateCudaLanes, "wait", wait)
    assert differences(planned(case, tight, late_tier(device, "compute"), 2), expected) != []


def test_an_update_too_early_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the CPU not to wait for gradients on their way down, it would take those of the step before."""
    if device == "cpu":
        pytest.skip("computing is the caller's there: it has waited for them itself")
    case = Case("llama", device)
    expected = planned(case, cpu_updates, late_tier(device, "offload"), 3)
    monkeypatch.setattr(LateCudaLanes, "finish", lambda lanes, event: None)
    assert differences(planned(case, cpu_updates, late_tier(device, "offload"), 3), expected) != []

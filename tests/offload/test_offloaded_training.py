"""Offloaded weights, states and activations change no number: language models, optimizers, tiers, one late stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.stages.device.tiers import DelayedTier, DiskTier, NullTier, Tier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.solve import eager_peak_bytes
from stowage.stages.solve.summary import Solved
from tests.matrix import some
from tests.offload.with_lower_tier import (
    LOWER_TIER,
    actions,
    assert_equal_with_lower_tier,
    smallest_with_lower_tier,
    solve_with_lower_tier,
)
from tests.runtime.beside_eager import MakeOptimizer, prepare
from tests.solve.prepared import Prepared
from tests.zoo import ZOO

MODELS = ("gpt2", "llama", "phi", "bloom", "mistral")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": adamw, "momentum": momentum}


@cache
def prepared_for(name: str, optimizer: str) -> Prepared:
    return prepare(ZOO[name], OPTIMIZERS[optimizer])


@cache
def smallest_for(name: str, optimizer: str) -> int:
    """The smallest budget from disk."""
    return smallest_with_lower_tier(prepared_for(name, optimizer))


@cache
def with_little_room() -> Solved:
    """A plan for GPT-2 under which most things move."""
    return solve_with_lower_tier(prepared_for("gpt2", "adamw"), int(1.2 * smallest_for("gpt2", "adamw")))


@pytest.mark.parametrize(
    ("name", "optimizer"), some(product(MODELS, OPTIMIZERS), keep=[("gpt2", "adamw"), ("llama", "momentum")])
)
def test_equal_to_eager_from_disk(name: str, optimizer: str, tmp_path: Path) -> None:
    prepared = prepared_for(name, optimizer)
    smallest = smallest_for(name, optimizer)
    assert smallest < prepared.solve().summary.smallest_feasible_bytes, "offloading needs less than recomputing"
    solved = solve_with_lower_tier(prepared, int(1.05 * smallest))
    done = actions(solved)
    assert done["offload"] >= 5
    assert done["reload"] >= done["offload"]
    tier = DiskTier(tmp_path)
    assert_equal_with_lower_tier(ZOO[name], prepared, solved, tier, OPTIMIZERS[optimizer])
    tier.close()


@pytest.mark.parametrize(
    "name",
    some(
        ["gpt2", "t5", "resnet", "tied", "lstm", "gpt2_frozen", "in_place"],
        keep=["gpt2_frozen", "tied", "in_place"],
        exactness=["tied"],
    ),
)
def test_the_order_of_verbs(name: str) -> None:
    """NullTier fills what is under way with NaN and checks every verb."""
    prepared = prepared_for(name, "adamw")
    smallest = smallest_for(name, "adamw")
    for budget in (smallest, int(1.3 * smallest), prepared.solve().summary.keep_all_peak_bytes):
        solved = solve_with_lower_tier(prepared, budget)
        assert solved.summary.device_peak_bytes <= budget
        tier = NullTier()
        assert_equal_with_lower_tier(ZOO[name], prepared, solved, tier, adamw, iterations=3)
        assert tier.unwaited == []


@pytest.mark.parametrize("stream", ["offload", "reload"])
def test_a_late_stream_changes_nothing(stream: Stream, tmp_path: Path) -> None:
    prepared = prepared_for("gpt2", "adamw")
    solved = with_little_room()
    tier: Tier = DelayedTier(DiskTier(tmp_path), stream, 0.01)
    assert_equal_with_lower_tier(ZOO["gpt2"], prepared, solved, tier, adamw, iterations=2)
    tier.close()


def test_a_missing_wait_for_a_reload_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with these waits taken out must not give the same numbers."""
    prepared = prepared_for("gpt2", "adamw")
    solved = with_little_room()
    monkeypatch.setattr(Offloading, "wait", without_waits(Offloading.wait, "reloading"))
    tier: Tier = DelayedTier(DiskTier(tmp_path), "reload", 0.05)
    with pytest.raises(AssertionError):
        assert_equal_with_lower_tier(ZOO["gpt2"], prepared, solved, tier, adamw, iterations=2)


def test_a_missing_wait_for_an_offload_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy down holds its tensor until it is done, so the numbers stay and the memory is wrong."""
    prepared = prepared_for("gpt2", "adamw")
    solved = with_little_room()
    monkeypatch.setattr(Offloading, "wait", without_waits(Offloading.wait, "offloading"))
    tier = NullTier()
    assert_equal_with_lower_tier(ZOO["gpt2"], prepared, solved, tier, adamw, iterations=1)
    assert len(tier.unwaited) > 5


def without_waits(wait: Callable[..., torch.Tensor | None], direction: str) -> Callable[..., torch.Tensor | None]:
    class Nothing:
        def wait(self) -> None: ...

        def done(self) -> bool:
            return True

    def hurried(self: object, name: str) -> torch.Tensor | None:
        under_way = self._under_way  # type: ignore[attr-defined]
        if name in under_way and under_way[name].direction == direction:
            under_way[name] = replace(under_way[name], transfer=Nothing())
        return wait(self, name)

    return hurried


@pytest.mark.parametrize(("name", "optimizer"), some(product(["gpt2", "llama"], OPTIMIZERS), keep=[("llama", "adamw")]))
def test_updates_on_the_cpu(name: str, optimizer: str) -> None:
    """Where the lower tier is memory, gradients are offloaded and the CPU updates there, to the same bits."""
    prepared = prepared_for(name, optimizer)
    lower_tier = replace(LOWER_TIER, cpu_update_bytes_per_s=1e10)
    solved = solve_with_lower_tier(
        prepared, int(0.4 * eager_peak_bytes(prepared.trace, prepared.nodes)), lower_tier=lower_tier
    )
    assert actions(solved)["update"] >= 3
    summary = solved.summary
    assert 0 < summary.rates_bound_s <= summary.step_time_s <= 1.05 * summary.fractional_time_s, "rounding loses < 5%"
    assert_equal_with_lower_tier(ZOO[name], prepared, solved, NullTier(), OPTIMIZERS[optimizer], iterations=4)

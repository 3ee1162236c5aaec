"""`best_batch`: the estimate, the sizes planned around it, and the best of all sizes by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stowage.flows import best_batch
from stowage.flows.api.lower_tier import lower_tier_for
from stowage.flows.api.offload import Offload
from stowage.flows.planning.batch_sizes import BatchPlan, plan_around
from stowage.flows.planning.step import QUICK, Planning, StepToPlan, plan_step, target_device
from stowage.stages.ir.errors import Infeasible, ParameterError, TraceError
from stowage.stages.ir.machine import DISK_STAGING_BYTES
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.workload.models import build_model
from stowage.stages.workload.resize import resized, samples_of
from stowage.stages.workload.samples import Batch, sample_batch
from tests.matrix import examples, some

SHAPE = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 128}
LARGEST = 6

WORSE = 1.03
"""What the best of the sizes tried may lose against the best of all. The estimate takes times to be proportional to the
batch, where each operation also costs the same to start for every batch, and fractions of options and tensors that
plans do not have; two more sizes are tried beyond its neighbours."""


def workload() -> tuple[nn.Module, Batch, Callable[[Any], torch.optim.Optimizer]]:
    model = build_model("gpt2", SHAPE, seed=0)
    return model, sample_batch(model, 4, 64, 1), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)


# By brute force.


@cache
def planned(stores: Path, size: int, budget: int, method: str, offload_dir: Path | None) -> PlanSummary | int:
    """The plan for one size, made as `fit` makes it; the smallest feasible budget where there is none."""
    model, batch, make = workload()
    target = target_device("cpu", stores)
    lower = lower_tier_for(target, Offload(offload_dir), method=method)
    try:
        how = Planning(
            stores=stores,
            effort=QUICK,
            costs="roofline",
            target=target,
            method=method,
            lower_tier=lower.lower_tier if lower else None,
        )
        step = StepToPlan(model=model, batch=resized(batch, size), optimizer=make(model.parameters()))
        return plan_step(step, budget, how).summary
    except Infeasible as infeasible:
        return infeasible.smallest_feasible_bytes


@pytest.mark.long
@pytest.mark.parametrize(("method", "share"), some([("rockmate", 0.6), ("offmate", 0.7)], keep=[("offmate", 0.7)]))
def test_no_other_size_is_much_better(method: str, share: float, fit_stores: Path) -> None:
    model, batch, make = workload()
    folder = None if method == "rockmate" else fit_stores / "offload"
    whole = planned(fit_stores, LARGEST, 1 << 40, "rockmate", None)
    assert isinstance(whole, PlanSummary)
    # A disk has buffers, which the budget counts.
    budget = int(share * whole.keep_all_peak_bytes) + (DISK_STAGING_BYTES if folder else 0)
    found = best_batch(
        model,
        batch,
        make,
        device_budget=budget,
        largest=LARGEST,
        method=method,
        offload_dir=folder,
        cache_dir=fit_stores,
        quick=True,
        costs="roofline",
    )
    everything = {size: planned(fit_stores, size, budget, method, folder) for size in range(1, LARGEST + 1)}
    times = {s: p.step_time_s / s if isinstance(p, PlanSummary) else math.inf for s, p in everything.items()}
    for plan in found.planned:
        assert plan.time_per_sample_s == pytest.approx(times[plan.batch_size])
    assert found.best.time_per_sample_s <= WORSE * min(times.values())
    assert found.best.plan is not None
    assert found.best.plan.device_peak_bytes <= budget == found.device_budget_bytes
    assert samples_of(found.batch) == found.batch_size
    assert found.estimate is not None
    assert {math.floor(found.estimate.batch), math.floor(found.estimate.batch) + 1} & {
        p.batch_size for p in found.planned
    }
    assert f"batch size {found.batch_size}: " in found.describe()


def test_not_even_one_sample_fits(fit_stores: Path) -> None:
    model, batch, make = workload()
    with pytest.raises(Infeasible) as refused:
        best_batch(model, batch, make, device_budget=1000, cache_dir=fit_stores, quick=True, costs="roofline")
    one = planned(fit_stores, 1, 1000, "auto", None)
    assert refused.value.smallest_feasible_bytes == one


def test_a_model_on_the_meta_device_needs_no_weights(fit_stores: Path) -> None:
    real, batch, make = workload()
    with torch.device("meta"):
        meta = build_model("gpt2", SHAPE, seed=0)
    how: dict[str, Any] = {"cache_dir": fit_stores, "quick": True, "costs": "roofline", "largest": 2}
    one = best_batch(real, batch, make, device_budget="70%", **how)
    two = best_batch(meta, batch, make, device_budget="70%", **how)
    assert (one.batch_size, one.device_budget_bytes) == (two.batch_size, two.device_budget_bytes)
    assert all(p.is_meta for p in meta.parameters())
    with pytest.raises(ParameterError, match="function that makes it"):
        best_batch(meta, batch, torch.optim.SGD(real.parameters()), device_budget="70%", **how)


# Which sizes are planned.


def summary(time_s: float) -> PlanSummary:
    numbers = dict.fromkeys(PlanSummary.__dataclass_fields__, 0)
    return PlanSummary(**(numbers | {"step_time_s": time_s}))  # type: ignore[arg-type]


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(
    st.integers(1, 40), st.floats(1, 60), st.floats(0.1, 50), st.floats(0, 0.5), st.integers(1, 40), st.integers(0, 45)
)
def test_sizes_around_the_estimate(
    largest: int, around: float, fixed: float, pressure: float, room: int, easy: int
) -> None:
    """Time per sample is 1 + fixed / b, and grows beyond `easy` samples; more than `room` do not fit."""
    asked: list[int] = []

    def plan(size: int) -> BatchPlan:
        assert 1 <= size <= largest
        assert size not in asked
        asked.append(size)
        if size > room:
            return BatchPlan(size, None, size)
        return BatchPlan(size, summary(size * (1 + pressure * max(0, size - easy)) + fixed), size)

    found = plan_around(plan, min(around, largest), largest)
    assert [p.batch_size for p in found] == sorted(asked)
    low = max(1, min(math.floor(min(around, largest)), largest - 1))
    assert {low, min(low + 1, largest)} <= set(asked)
    best = min(found, key=lambda p: p.time_per_sample_s)
    assert best.plan is not None
    # A neighbour that was not asked lies beyond the two extra sizes, or was shown to be no better.
    beyond = [s for s in (best.batch_size - 1, best.batch_size + 1) if 1 <= s <= largest and s not in asked]
    assert len(asked) >= 4 or not beyond or len(asked) == largest
    if min(room, largest) <= low:
        assert min(room, largest) in asked


def test_an_exact_estimate_is_confirmed() -> None:
    def plan(size: int) -> BatchPlan:
        return BatchPlan(size, summary(size * (1 + (size - 10) ** 2)), size)

    assert min(plan_around(plan, 10.4, 64), key=lambda p: p.time_per_sample_s).batch_size == 10
    assert [p.batch_size for p in plan_around(plan, 7.5, 64)] == [7, 8, 9, 10]
    assert [p.batch_size for p in plan_around(plan, 12.5, 64)] == [10, 11, 12, 13]


# Other batches.


def test_rows_are_repeated_or_left_out() -> None:
    ids = torch.arange(12).reshape(3, 4)
    batch = {
        "ids": ids,
        "labels": ids,
        "positions": torch.arange(4)[None],
        "scale": torch.tensor(2.0),
        "n": 5,
        "x": None,
    }
    larger, smaller = resized(batch, 7), resized(batch, 2)
    assert torch.equal(larger["ids"], ids[[0, 1, 2, 0, 1, 2, 0]])
    assert larger["labels"] is larger["ids"]
    assert torch.equal(smaller["ids"], ids[:2])
    assert smaller["ids"].untyped_storage().nbytes() == 2 * 4 * 8
    for other in (larger, smaller):
        assert other["positions"] is batch["positions"]
        assert other["scale"] is batch["scale"]
        assert other["n"] == 5
    assert resized(batch, 3) is batch
    assert torch.equal(resized((ids, [ids]), 1)[1][0], ids[:1])


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"n": 3}, "no tensor whose first dimension counts samples"),
        (torch.tensor(1.0), "no tensor whose first dimension counts samples"),
        ({"ids": torch.ones(2, 2), "meta": object()}, "holds a object"),
    ],
)
def test_what_cannot_be_resized_is_said(batch: Any, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        resized(batch, 4)


class Fixed(nn.Module):
    """Takes two samples and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def test_a_model_of_one_size_is_named_and_resize_can_help(fit_stores: Path) -> None:
    how: dict[str, Any] = {"cache_dir": fit_stores, "quick": True, "costs": "roofline", "device_budget": "2MiB"}
    with pytest.raises(TraceError, match=r"2 samples and cannot be with 4.*pass resize"):
        best_batch(Fixed(), torch.ones(2, 3), **how)

    def columns(batch: torch.Tensor, size: int) -> torch.Tensor:
        return torch.ones(size, 2, 3)

    assert best_batch(Fixed(), torch.ones(2, 3), resize=columns, largest=3, **how).batch.shape[0] <= 3
    with pytest.raises(ParameterError, match="largest is 0"):
        best_batch(Fixed(), torch.ones(2, 3), largest=0, **how)

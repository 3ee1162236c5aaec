"""`fit` with leave for `top10` and masks that change: equal to plain PyTorch with hooks, within the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, Lossy, fit
from stowage.flows.api import planner
from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.job import Costing, StepToPlan
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.solve import Solved, frozen_ways
from stowage.stages.trace import trace_step
from stowage.stages.workload.samples import sample_batch
from tests.configurations.alongside import small_gpt2
from tests.freezing.beside import Given, assert_equal_to_plain, assert_worst_measured
from tests.freezing.pruned import norms_of, pruned
from tests.freezing.test_fit_that_freezes import adamw, classifier, momentum, texts
from tests.runtime.beside_eager import differences, same

Fit = Callable[..., Any]

DEVICE = DeviceDescription("made-up", "made up", "cpu", 1 << 34, 1e9, 1e12, 1e9, 1e9, 1e9, 1e12, 1e-9)
"""Products take all the time, so that a plan which makes a block again is slower than one with codes."""


@pytest.fixture
def leave(fit_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """`fit` with leave, for a device of which no measurement decides anything; a block is kept whole or not at all."""

    def estimated(step: StepToPlan, how: Costing) -> Costed:
        return cost_step(step, replace(how, costs="roofline", target=DEVICE))

    monkeypatch.setattr(planner, "cost_step", estimated)
    return partial(
        fit,
        method="rotor",
        cache_dir=fit_stores,
        quick=True,
        lossy=Lossy(["top10"], max_gradient_error=1.0),
        say=lambda text: None,
    )


@pytest.fixture
def codes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a plan with codes where there is one, be it the fastest or not."""

    def preferred(found: Sequence[Solved]) -> Solved:
        return next(plan for plan in found if plan.summary.lossy)

    monkeypatch.setattr(frozen_ways, "preferred", preferred)


def gpt2() -> nn.Module:
    return small_gpt2(n_positions=64)


def reference(model: nn.Module, batch: Any, variant: str) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The loss of plain PyTorch with hooks at the layer normalisations for which a variant has codes."""
    paths = norms_of(trace_step(model, batch), variant)
    assert paths

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with pruned(model, paths):
            found: torch.Tensor = model(**batch).loss
            return found

    return loss


def test_the_faster_plan_has_codes(leave: Fit) -> None:
    """Without them a second block would be made again, in every step."""
    model, plain, policy = gpt2(), gpt2(), Given(most=2)
    batch = sample_batch(model, 8, 64, 0)
    step = leave(model, batch, adamw, device_budget="67.5%", freeze=Freeze(policy=policy))
    plan = step.plan
    assert plan.lossy
    assert all(kept.startswith("top10: ") and kept.endswith(" while frozen") for kept in plan.lossy)
    assert not plan.exact
    assert 0 < plan.gradient_error <= 1.0
    loss = reference(gpt2(), batch, plan.variant)
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), loss, [batch])
    assert_worst_measured(step, policy, batch)
    exact = leave(gpt2(), batch, adamw, device_budget="67.5%", freeze=Freeze(policy=policy), lossy=None).plan
    assert exact.step_time_s > 1.02 * plan.step_time_s


@pytest.mark.usefixtures("codes_first")
@pytest.mark.parametrize("units", ["saving", "parameter"])
def test_a_classifier(units: Any, leave: Fit) -> None:
    model, plain, policy = classifier(), classifier(), Given(most=4)
    given = texts(3)
    step = leave(model, given[0], momentum, device_budget="65%", freeze=Freeze(policy=policy, units=units))
    loss = reference(classifier(), given[0], step.plan.variant)
    assert_equal_to_plain(step, policy, plain, momentum(plain.parameters()), loss, given)


@pytest.mark.usefixtures("codes_first")
def test_resumed_equals_uninterrupted(leave: Fit, tmp_path: Path) -> None:
    model = gpt2()
    batch = sample_batch(model, 8, 64, 0)
    made = partial(leave, device_budget="70%", freeze=Freeze(0.8, "random"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        whole = made(model, batch, adamw)
        assert whole.plan.lossy
        losses = []
        for i in range(6):
            losses.append(whole(batch))
            if i == 2:
                whole.save(tmp_path / "checkpoint")
        torch.manual_seed(2)
        resumed = made(gpt2(), batch, adamw)
        resumed.load(tmp_path / "checkpoint")
        assert same(torch.stack([resumed(batch) for _ in range(3)]), torch.stack(losses[3:]))
        assert differences(resumed.model, whole.model) == []


def test_without_freezing_plans_are_as_without_leave(leave: Fit) -> None:
    batch = sample_batch(gpt2(), 8, 64, 0)
    found = [leave(gpt2(), batch, adamw, device_budget="70%", **more) for more in ({}, {"lossy": None})]
    assert found[0].plan.exact
    assert found[0].planned.source == found[1].planned.source

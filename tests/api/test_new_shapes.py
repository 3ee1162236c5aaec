"""What happens when a batch of a new form comes, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage.flows.api.planner as planner
from stowage.flows import fit
from stowage.flows.planning.effort import QUICK, Effort
from stowage.stages.ir.errors import ParameterError
from tests.api.test_lengths import Beside, Tagger, adam, batch_of


def test_every_planning_says_why(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 16)
    beside.train(9, 7)
    assert any("new shape (4, 9): second of this run" in s for s in beside.said)
    assert any("new shape (4, 7): third of this run" in s for s in beside.said)
    beside.step.evaluate(batch_of(7))
    assert any("evaluation, new shape (4, 7): first of this run" in s for s in beside.said)
    said = len(beside.said)
    beside.train(9, 16)
    beside.step.evaluate(batch_of(7))
    assert len(beside.said) == said


def test_a_changed_model_says_what_changed(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 16)
    beside.step.model.eval()
    beside.other.eval()
    beside.train(16)
    assert any("the model has changed" in s and "eval" in s for s in beside.said), beside.said


def test_error_names_the_form_and_the_known_ones(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 16, forms=[batch_of(8)], new_shapes="error")
    beside.train(16, 8, 16)
    before = {name: p.detach().clone() for name, p in beside.model.named_parameters()}
    with pytest.raises(ParameterError, match=r"\(4, 9\).*'error'.*\(4, 16\); \(4, 8\)"):
        beside.step(batch_of(9))
    assert all(torch.equal(before[name], p) for name, p in beside.model.named_parameters())
    beside.step.evaluate(batch_of(9))  # evaluation is planned all the same
    beside.train(8)


def test_error_still_plans_other_micro_batches(fit_stores: Path) -> None:
    model = Tagger()
    step = fit(
        model, batch_of(8), adam, device_budget="200%", cache_dir=fit_stores, quick=True, new_shapes="error",
        say=lambda _: None,
    )  # fmt: skip
    step(batch_of(8), update=False)
    step(batch_of(8))


def test_an_unknown_word(fit_stores: Path) -> None:
    with pytest.raises(ParameterError, match="new_shapes is 'ask': give one of plan, quick, error"):
        Beside(Tagger, fit_stores, 8, new_shapes="ask")


class Branching(nn.Module):
    """Long batches go another way: nothing that is known of short ones helps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.first(x))
        if len(x) > 8:
            for _ in range(4):
                y = torch.sin(self.second(torch.cat([y, y]))).view(2, -1, 6).sum(0)
        return y.pow(2).mean()


@pytest.mark.parametrize(("new_shapes", "effort"), [("plan", "full"), ("quick", "quick")])
def test_what_is_known_of_nothing_is_planned_with_the_effort_asked_for(
    new_shapes: str, effort: str, fit_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Effort] = []
    original = planner.cost_step

    def cost_step(step: Any, how: Any) -> Any:
        used.append(how.effort)
        return original(step, replace(how, effort=QUICK))

    monkeypatch.setattr(planner, "cost_step", cost_step)
    said: list[str] = []
    model = Branching()
    step = fit(
        model, (torch.randn(6, 6),), adam, device_budget=10_000, cache_dir=fit_stores, new_shapes=new_shapes,
        say=said.append,
    )  # fmt: skip
    step((torch.randn(40, 6),))
    assert [e == QUICK for e in used] == [False, effort == "quick"]
    assert any("training waits" in s for s in said)


def test_a_changed_optimizer_is_the_reason(fit_stores: Path) -> None:
    said: list[str] = []
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fit(
        model,
        torch.randn(2, 4),
        optimizer,
        device_budget="1GiB",
        loss=lambda out, _: out.square().mean(),
        cache_dir=fit_stores,
        quick=True,
        say=said.append,
    )
    optimizer.param_groups[0]["momentum"] = 0.9
    step(torch.randn(2, 4))
    assert any("the optimizer has changed: momentum of group 0" in text for text in said)

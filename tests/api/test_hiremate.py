"""The whole step as one block, solved by clusters: exact, within the budget, also where that is as small as can be."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from stowage.flows import fit
from stowage.flows.planning.step import QUICK, Costed, Costing, Planning, StepToPlan, cost_step, plan_costed
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.plan import PlanSummary
from tests.matrix import some
from tests.zoo import ZOO


@pytest.fixture(scope="module")
def costed(tmp_path_factory: pytest.TempPathFactory) -> Costed:
    model, batch, loss = ZOO["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stores = tmp_path_factory.mktemp("stores")
    step = StepToPlan(model=model, batch=batch, loss=loss, optimizer=optimizer)
    return cost_step(step, Costing(stores=stores, costs="roofline", effort=QUICK))


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resnet"])
def test_training_under_a_plan_of_clusters_equals_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch, loss = ZOO[name]()
    eager = copy.deepcopy(model)
    with pytest.raises(Infeasible) as found:
        fit(model, batch, adam, device_budget=1, loss=loss, method="hiremate", quick=True, cache_dir=tmp_path)
    budget = found.value.smallest_feasible_bytes
    step = fit(model, batch, adam, device_budget=budget, loss=loss, method="hiremate", quick=True, cache_dir=tmp_path)
    assert step.plan.method == "hiremate"
    assert len(step.planned.blocks) == 1
    assert step.plan.recomputed_bytes > 0
    optimizer = adam(eager.parameters())
    torch.manual_seed(7)
    planned = [step(batch).item() for _ in range(3)]
    torch.manual_seed(7)
    plain = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = eager(**batch)
        value = loss(outputs, batch) if loss else outputs.loss
        value.backward()
        optimizer.step()
        plain.append(value.item())
    assert planned == plain
    for one, other in zip(step.model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert step.measure(batch).peak_bytes <= budget


def test_an_unknown_method_is_one_sentence(tmp_path: Path) -> None:
    model, batch, loss = ZOO["unet"]()
    with pytest.raises(ParameterError, match=r"method is one of auto, rockmate, .*, not 'fastest'"):
        fit(model, batch, adam, device_budget="80%", loss=loss, method="fastest", quick=True, cache_dir=tmp_path)


@pytest.mark.parametrize("method", some(["rotor", "chen_sqrt", "recompute_all"], keep=["rotor"]))
def test_auto_is_never_worse_than_what_it_is_compared_with(method: str, costed: Costed, tmp_path: Path) -> None:
    """Within the peak of the other's plan."""

    def planned(name: str, budget: int) -> PlanSummary:
        return plan_costed(costed, budget, Planning(method=name, stores=tmp_path, effort=QUICK)).summary

    roomy = 2 * costed.eager_peak_bytes
    if method in ("chen_sqrt", "recompute_all"):
        other = planned(method, roomy)
    else:
        with pytest.raises(Infeasible) as found:
            planned(method, 1)
        other = planned(method, (found.value.smallest_feasible_bytes + costed.eager_peak_bytes) // 2)
    assert other.method == method
    ours = planned("auto", other.device_peak_bytes)
    assert ours.step_time_s <= other.step_time_s * (1 + 1e-9)
    assert ours.device_peak_bytes <= other.device_peak_bytes


@pytest.mark.parametrize(
    ("method", "name"),
    some(
        [("h_ilp", "resnet"), ("h_retention", "resnet"), ("tw_remat", "resnet"), ("tw_remat", "unet")],
        keep=[("tw_remat", "resnet")],
    ),
)
def test_a_part_of_hiremate_alone(method: str, name: str, tmp_path: Path) -> None:
    model, batch, loss = ZOO[name]()
    with pytest.raises(Infeasible) as found:
        fit(model, batch, adam, device_budget=1, loss=loss, method=method, quick=True, cache_dir=tmp_path)
    budget = found.value.smallest_feasible_bytes
    step = fit(model, batch, adam, device_budget=budget, loss=loss, method=method, quick=True, cache_dir=tmp_path)
    assert step.plan.method == method
    assert ("tw_remat" in step.plan.solver) == (method == "tw_remat")
    assert step.plan.device_peak_bytes <= budget

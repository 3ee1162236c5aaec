"""The whole step as one block, solved by clusters: exact, within the budget, also where that is as small as can be."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible, ParameterError
from tests.zoo import ZOO


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
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
    with pytest.raises(ParameterError, match="method is one of auto, rockmate, hiremate, offmate, not 'fastest'"):
        fit(model, batch, adam, device_budget="80%", loss=loss, method="fastest", quick=True, cache_dir=tmp_path)

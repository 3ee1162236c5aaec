"""Names of modules may have anything but dots in them; a plan that freezes such units is legal."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stowage.flows import Freeze, fit
from stowage.stages.freezing.stored import check_plan
from tests.freezing.beside import units_in

NAMES = ("a, b", "('user', 'rates')", "c;d|e\n")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in NAMES})

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            batch = torch.tanh(self.layers[name](batch))
        return batch


def test_a_plan_is_what_its_summary_says(tmp_path: Path) -> None:
    model, batch = Named(), torch.randn(8, 64)
    step = fit(
        model,
        batch,
        torch.optim.AdamW(model.parameters()),
        device_budget="10MiB",
        loss=lambda output, _: output.square().mean(),
        freeze=Freeze(0.3, "random"),
        cache_dir=tmp_path,
        quick=True,
    )
    units, found = units_in(step), step.planned
    assert found is not None
    assert 0 < len(step.plan.worst_units) <= step.plan.active_units
    assert set(step.plan.worst_units) < {unit.name for unit in units}
    check_plan(found.trace, found.nodes, found.rows, found.slots, found.summary, units)
    step(batch)

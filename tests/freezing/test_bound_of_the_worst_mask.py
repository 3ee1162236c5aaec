"""A plan that freezes fits a budget only if no choice of units is left that might exceed it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Freeze, fit
from stowage.stages.formulations.freezing.worst_mask import worst_mask
from tests.zoo import ZOO


def test_what_a_solver_left_open_counts_as_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(budget: Any, folder: str) -> Any:
        model, batch, loss = ZOO["gpt2"]()
        optimizer = torch.optim.AdamW(model.parameters())
        kept = tmp_path / folder
        return fit(
            model, batch, optimizer, loss=loss, device_budget=budget, cache_dir=kept, quick=True,
            freeze=Freeze(0.5), say=lambda text: None,
        ).plan  # fmt: skip

    plan = planned("100%", "one")
    assert plan.worst_bound_bytes == plan.device_peak_bytes
    assert planned(plan.device_peak_bytes, "one").device_peak_bytes <= plan.device_peak_bytes

    def hurried(*given: Any) -> Any:
        found = worst_mask(*given)
        return replace(found, bound_bytes=found.nbytes + (1 << 30))

    monkeypatch.setattr("stowage.stages.solve.frozen.worst_mask", hurried)
    assert planned("100%", "two").worst_bound_bytes == plan.all_active_bytes, "more than if all train it cannot be"
    careful = planned(plan.device_peak_bytes, "two")
    assert careful.all_active_bytes <= plan.device_peak_bytes < plan.all_active_bytes

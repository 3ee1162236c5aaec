"""What people read where a plan cannot be had: their own modules, and numbers that can be told apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible


def small_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)))


def refused(stores: Path, **arguments: object) -> str:
    model, batch = small_model(), {"input": torch.ones(4, 8)}
    with pytest.raises(Infeasible) as caught:
        fit(
            model,
            batch,
            torch.optim.AdamW(model.parameters()),
            loss=lambda outputs, _: outputs.sum(),
            quick=True,
            cache_dir=stores,
            **arguments,  # type: ignore[arg-type]
        )
    return str(caught.value)


def test_a_budget_that_cannot_be_met_speaks_of_modules_and_passes(fit_stores: Path) -> None:
    text = refused(fit_stores, device_budget="10KiB")
    assert text.startswith("The device budget of 10.0 KiB cannot be met")
    assert re.search(r"the smallest feasible budget is \d+\.\d KiB \(\d+ bytes\)", text)
    assert re.search(r"bound at (\d\.\d, (forward|backward)|the update of \d\.\d\.(weight|bias)), where ", text)
    assert "option" not in text
    assert "0.0 MiB" not in text
    smallest = int(re.search(r"\((\d+) bytes\)", text).group(1))  # type: ignore[union-attr]
    almost = refused(fit_stores, device_budget=smallest - 1)
    assert f"of {smallest - 1:,} bytes cannot be met" in almost
    assert f"the smallest feasible budget is {smallest:,} bytes" in almost


def test_staging_buffers_that_bind_are_named(fit_stores: Path, tmp_path: Path) -> None:
    text = refused(fit_stores, device_budget="10KiB", method="offmate", offload_dir=tmp_path / "lower_tier")
    assert "most is taken by staging buffers of the lower tier 16.0 MiB" in text
    assert text.endswith("raise the budget, or leave out `offload_dir`, without which there are no such buffers.")

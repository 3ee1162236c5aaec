"""A bounded list of what was used lately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api.recent import Recent


def test_the_latest_few_are_kept() -> None:
    recent = Recent[str](2)
    assert recent.latest is None
    assert recent.add("a") == recent.add("b") == []
    assert recent.find(lambda item: item == "a") == "a"
    assert list(recent) == ["a", "b"]
    assert recent.add("c") == ["b"]
    assert recent.find(lambda item: item == "b") is None
    assert (recent.latest, len(recent), recent[1]) == ("c", 2, "a")
    assert recent.add("a") == []
    assert list(recent) == ["a", "c"]
    recent.replace("c", "d")
    assert recent[:] == ["a", "d"]
    recent.forget(lambda item: item == "a")
    assert list(recent) == ["d"]


def test_steps_of_many_lengths_are_bounded(fit_stores: Path) -> None:
    """Training programs, programs of evaluations and recorded steps: none grows with the lengths of batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def batch(length: int) -> Any:
        return (torch.randn(length, 4),)

    step = fit(
        model, batch(3), lambda p: torch.optim.SGD(list(p), lr=0.1), loss=lambda y, _: y.pow(2).mean(),
        device_budget="200%", cache_dir=fit_stores, quick=True, programs=2, check="never", say=lambda text: None,
    )  # fmt: skip
    for length in range(4, 8):
        step(batch(length))
        step.evaluate(batch(length))
        assert len(step.programs.known) <= 2
        assert len(step.programs.live.traced) <= 2 + 2
    assert step.programs.latest is step.programs.known[0]
    assert step.evaluation is not None

"""`stow(trainer, freeze=...)` and `lossy=` on two ranks: the numbers, states and files of DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.sharding.frozen_trainer import SAVED, STEPS
from tests.sharding.ranks import run_on_ranks


def saved(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    """Return weights and optimizer states of a checkpoint."""
    checkpoint = folder / f"checkpoint-{step}"
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    return load_file(checkpoint / "model.safetensors"), states


def assert_same(one: Path, other: Path, step: int) -> None:
    """Weights and states, bit for bit; a parameter that never trained has no state in either."""
    (weights, states), (their_weights, their_states) = saved(one, step), saved(other, step)
    assert weights.keys() == their_weights.keys()
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)
    assert states.keys() == their_states.keys()
    assert all(torch.equal(states[i][key], their_states[i][key]) for i in states for key in their_states[i])


def ran(mode: str, folder: Path) -> list[Any]:
    found = run_on_ranks("tests.sharding.frozen_trainer", mode, str(folder), limit_s=500)
    assert all(rank["within"] for rank in found)
    assert len({rank["plan"] for rank in found}) == 1
    return found


@pytest.mark.long
def test_a_trainer_on_two_ranks_freezes_as_under_ddp(tmp_path: Path) -> None:
    for rank in ran("beside", tmp_path):
        losses = rank["losses"]
        assert losses["stowed"] == losses["plain"]
        assert len(set(losses["plain"])) == STEPS
    for step in (SAVED, STEPS):
        assert_same(tmp_path / "stowed", tmp_path / "plain", step)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["freezes", "packs"])
def test_another_trainer_goes_on(mode: str, tmp_path: Path) -> None:
    for rank in ran(mode, tmp_path):
        losses = rank["losses"]
        assert losses["again"] == losses["whole"]
        assert len(losses["whole"]) == STEPS
        assert set(rank["codes"]) == ({"int8_tensor"} if mode == "packs" else set())
        assert rank["exact"] == (mode != "packs")
        active, units = rank["units"]
        assert mode == "packs" or 0 < active < units
    assert_same(tmp_path / "again", tmp_path / "whole", STEPS)
    chosen = tmp_path / "whole" / f"checkpoint-{SAVED}" / "freezing.json"
    assert chosen.is_file() == (mode == "freezes")

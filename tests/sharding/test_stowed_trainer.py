"""`stow` in the place of DistributedDataParallel: a Trainer on two ranks, its numbers and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.sharding.ranks import run_on_ranks


@pytest.mark.long
def test_a_trainer_on_two_ranks_trains_saves_and_goes_on_as_under_ddp(tmp_path: Path) -> None:
    found = run_on_ranks("tests.sharding.stowed_trainer", str(tmp_path), limit_s=500)
    for rank in found:
        plain, again = rank["plain"], rank["again"]
        assert rank["stowed"] == plain
        assert len(plain["losses"]) == 5
        assert len(plain["evaluations"]) == 12, "three numbers of each evaluation, one of which is after training"
        assert len(set(plain["evaluations"])) > 6, "weights and numbers change"
        assert again["losses"][-3:] == plain["losses"][-3:], "resumed after two steps by another Trainer"
        assert again["evaluations"][-9:] == plain["evaluations"][-9:]
        assert rank["within"]
        assert rank["gathers"]
        assert "ddp_broadcast_buffers=False" in rank["refused"]
    for step in (2, 4, 5):
        plain, stowed = (tmp_path / kind / f"checkpoint-{step}" for kind in ("plain", "stowed"))
        assert {p.name for p in plain.iterdir()} == {p.name for p in stowed.iterdir()}
        one, other = load_file(plain / "model.safetensors"), load_file(stowed / "model.safetensors")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        states, theirs = (torch.load(f / "optimizer.pt", weights_only=True)["state"] for f in (plain, stowed))
        assert states.keys() == theirs.keys()
        assert all(torch.equal(states[i][key], theirs[i][key]) for i in states for key in ("exp_avg", "exp_avg_sq"))
    for step in (4, 5):
        one, other = (
            load_file(tmp_path / kind / f"checkpoint-{step}" / "model.safetensors") for kind in ("plain", "again")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)

"""The stage `train` on `train.data.callable`: as plain PyTorch, and the same numbers after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import some
from tests.train.test_killed_processes import losses, run, whole_project
from tests.train.test_what_a_run_belongs_to import checkpoints, cut_off, mine, parameters, planned_mine

__all__ = ["mine", "planned_mine", "whole_project"]

DATA = """
import torch
from torch.utils.data import DataLoader

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return {"x": torch.full((8,), SCALE * i)}

SCALE = 0.1

def one(seed, iteration):
    return {"x": SCALE * torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + iteration))}

def many(seed):
    return DataLoader(Rows(), batch_size=4, shuffle=True)
"""


@pytest.mark.parametrize("function", some(["one", "many"], keep=["one"]))
def test_a_killed_run_goes_on_with_the_same_batches(mine: Path, function: str) -> None:
    (mine / "my_data.py").write_text(DATA)
    parameters(mine, train__data={"callable": f"my_data:{function}"}, train__steps=8, train__checkpoint_every=2)
    done = run(mine, "train")
    assert done.returncode == 0, done.stderr
    whole = losses(mine)
    assert len(set(whole)) == 8, "every step has another batch"
    assert checkpoints(mine) == []
    cut_off(mine, 4)
    (mine / "my_data.py").write_text(DATA.replace("0.1", "0.2"))
    done = run(mine, "train")
    assert done.returncode == 0, done.stderr
    assert losses(mine)[0] != whole[0], "other code begins anew"
    (mine / "my_data.py").write_text(DATA)
    done = run(mine, "train")
    assert done.returncode == 0, done.stderr
    assert losses(mine) == whole
    assert checkpoints(mine) == [], "what the first had left, went on"


def test_batches_of_another_form_are_one_sentence(mine: Path) -> None:
    (mine / "my_data.py").write_text(DATA.replace("4, 8", "5, 8"))
    parameters(mine, train__data={"callable": "my_data:one"})
    done = run(mine, "train")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("error: train.data.callable 'my_data:one', iteration 0: ['x'] is float32 of shape (5, 8)")

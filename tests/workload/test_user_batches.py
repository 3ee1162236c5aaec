"""Batches of a user's function: the two kinds, what is refused, and generators that are left alone."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.user_batches import UserBatches

SAMPLE = {"x": torch.zeros(2, 3), "y": torch.zeros(2, dtype=torch.int64)}
HEAD = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

def batch(x):
    return {"x": x, "y": torch.zeros(2, dtype=torch.int64)}
"""
KINDS = {
    "pure": "def make(seed, iteration):\n    return batch(torch.full((2, 3), float(seed * 100 + iteration)))",
    "pure_from_the_global_generator": "def make(seed, iteration):\n    return batch(torch.rand(2, 3))",
    "pure_without_a_seed": "def make(iteration):\n    return batch(torch.full((2, 3), float(iteration)))",
    "list": "def make():\n    return [batch(torch.full((2, 3), float(i))) for i in range(4)]",
    "generator": (
        "def make(seed):\n    while True:\n"
        "        yield batch(torch.rand(2, 3) + random.random() + float(np.random.rand()))"
    ),
    "shuffled_loader": (
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, i):\n        return {'x': torch.full((3,), float(i)), 'y': torch.tensor(0)}\n"
        "def make(seed):\n    return DataLoader(Rows(), batch_size=2, shuffle=True)"
    ),
}
"""Sources of a function `make`."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_batches", raising=False)
    return tmp_path / "my_batches.py"


def made(path: Path, source: str, seed: int = 3) -> UserBatches:
    path.write_text(HEAD + source)
    sys.modules.pop("my_batches", None)
    return UserBatches("my_batches:make", seed, SAMPLE, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_iteration_is_the_same_wherever_training_begins(written: Path, kind: str) -> None:
    whole = made(written, KINDS[kind])
    batches = [whole(i)["x"] for i in range(10)]
    assert len({tuple(b.flatten().tolist()) for b in batches}) >= 4
    torch.manual_seed(99)
    for start in (0, 1, 7):
        resumed = made(written, KINDS[kind])
        for i in range(start, 10):
            assert torch.equal(resumed(i)["x"], batches[i])
    assert torch.equal(whole(2)["x"], batches[2]), "going back is possible"


@pytest.mark.parametrize("kind", ["pure_from_the_global_generator", "generator", "shuffled_loader"])
def test_the_seed_decides_and_other_generators_are_left_alone(written: Path, kind: str) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    one, other = made(written, KINDS[kind], seed=1), made(written, KINDS[kind], seed=2)
    differ = [not torch.equal(one(i)["x"], other(i)["x"]) for i in range(4)]
    assert any(differ)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1], before[2]) == (np.random.get_state()[1].tolist(), random.getstate())


MISTAKES = {
    "def make(path):\n    pass": "takes path: it must take `seed` and `iteration`",
    "def make(seed, /, iteration):\n    pass": "takes seed: it must take",
    "def make(seed):\n    return 5": "must return an iterable of batches, or take `iteration` .* returns int",
    "def make(seed):\n    return {}": "must return an iterable of batches",
    "def make(seed):\n    return []": "ends after 0 batches",
    "def make(seed, iteration):\n    return torch.zeros(2)": "must be a dictionary of keyword arguments .* is Tensor",
    "def make(seed, iteration):\n    return {'x': torch.zeros(2, 3)}": "batch has x, and the step was traced with x, y",
    "def make(seed, iteration):\n    return batch(torch.zeros(4, 3))": (
        r"iteration 0: \['x'\] is float32 of shape \(4, 3\), and the step was traced with float32 of shape \(2, 3\)"
    ),
    "def make(seed, iteration):\n    return batch(torch.zeros(2, 3, dtype=torch.float64))": "is float64 of shape",
    "def make(seed, iteration):\n    raise KeyError('no file')": "raised KeyError: 'no file' in .*my_batches.py:",
    "n = []\ndef make(seed, iteration):\n    n.append(1)\n    return batch(torch.full((2, 3), float(len(n))))": (
        "gives two different batches for the same seed"
    ),
    "def make(seed):\n    yield batch(torch.zeros(2, 3))": "ends after 1 batches and cannot be iterated again",
}


def two(path: Path, source: str) -> None:
    batches = made(path, source)
    batches(0)
    batches(1)


@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_is_one_sentence(written: Path, source: str) -> None:
    with pytest.raises(ParameterError, match=MISTAKES[source]) as caught:
        two(written, source)
    assert str(caught.value).startswith("train.data.callable 'my_batches:make'")
    assert "\n" not in str(caught.value)


def test_there_must_be_such_a_function(written: Path) -> None:
    with pytest.raises(ParameterError, match="module my_batches has no make"):
        made(written, "")

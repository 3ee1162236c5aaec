"""Generated steps on the model of a GPU's streams: no race in any order, and the numbers of plain PyTorch."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.matrix import some
from tests.streams.checking import Job, check, in_random_order
from tests.streams.hand_plans import Way
from tests.streams.jobs import WAYS, disk_for, hand_job, summed_job
from tests.zoo import ZOO

SEEDS = range(4)
"""Paces: the host as far ahead as can be, up to hardly at all."""


def assert_right(job: Job, folder: Path, seed: int) -> None:
    """Nothing is found."""
    assert check(job, in_random_order(seed), disk_for(job, folder)).all() == [], f"{job.name}, order {seed}"


@pytest.mark.parametrize(
    ("name", "optimizer", "way", "seed"),
    some(
        product(ZOO, ("adamw", "momentum"), ("keep", "again", *WAYS), SEEDS),
        keep=[
            ("gpt2", "adamw", "everything", 0), ("gpt2", "momentum", "disk, by the CPU, around", 1),
            ("llama", "adamw", "by the CPU, around", 2),
            ("resnet", "adamw", "everything", 1), ("tied", "adamw", "by the CPU", 3),
            ("lstm", "adamw", "everything", 0), ("in_place", "adamw", "around", 1),
            ("batchnorm", "adamw", "again", 3), ("gpt2_frozen", "momentum", "weights", 0),
            ("vit", "adamw", "keep", 1),
        ],
    ),
)  # fmt: skip
def test_one_step_for_each_update(name: str, optimizer: str, way: str, seed: int, tmp_path: Path) -> None:
    assert_right(hand_job(name, optimizer, way), tmp_path, seed)


@pytest.mark.parametrize(
    ("name", "way", "max_grad_norm", "seed"),
    some(
        product(("gpt2", "llama", "resnet", "tied"), WAYS, (0.1, float("inf")), SEEDS),
        keep=[
            ("llama", "by the CPU, around", 0.1, 0),
            ("gpt2", "disk", 0.1, 1),
            ("tied", "by the CPU", float("inf"), 2),
        ],
    ),
)
def test_clipping(name: str, way: str, max_grad_norm: float, seed: int, tmp_path: Path) -> None:
    assert_right(hand_job(name, "adamw", way, max_grad_norm), tmp_path, seed)


@pytest.mark.parametrize(
    ("name", "gradients", "cpu_updates", "max_grad_norm", "seed"),
    some(
        product(("gpt2", "llama", "batchnorm"), (False, True), (False, True), (None, 0.1), SEEDS),
        keep=[("llama", False, True, 0.1, 0), ("llama", True, True, 0.1, 2)],
    ),
)
def test_several_micro_batches(
    name: str, gradients: bool, cpu_updates: bool, max_grad_norm: float | None, seed: int, tmp_path: Path
) -> None:
    """Gradients wait on the device or in the lower tier."""
    way = Way(gradients=gradients, cpu_updates=cpu_updates, disk=3)
    assert_right(summed_job(name, "adamw", way, max_grad_norm), tmp_path, seed)

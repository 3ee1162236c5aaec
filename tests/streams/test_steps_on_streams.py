"""Generated steps on the model of a GPU's streams: no race in any order, and the numbers of plain PyTorch."""

from __future__ import annotations

import zlib
from itertools import product
from pathlib import Path

import pytest

from tests.matrix import some
from tests.streams.checking import Job, check, in_random_order
from tests.streams.hand_plans import Way
from tests.streams.jobs import WAYS, disk_for, hand_job, summed_job
from tests.zoo import ZOO

PACES = 4
"""How far ahead the host is: as far as can be, up to hardly at all."""


def assert_right(job: Job, folder: Path, case: str) -> None:
    """Check that nothing is found. Cases take turns in their pace: clocks find a race whatever the order is."""
    seed = zlib.crc32(case.encode()) % PACES
    assert check(job, in_random_order(seed), disk_for(job, folder)).all() == [], f"{job.name}, order {seed}"


@pytest.mark.parametrize(
    ("name", "optimizer", "way"),
    some(
        product(ZOO, ("adamw", "momentum"), ("keep", "again", *WAYS)),
        keep=[
            ("gpt2", "adamw", "everything"), ("gpt2", "momentum", "disk, by the CPU, around"),
            ("llama", "adamw", "by the CPU, around"),
            ("resnet", "adamw", "everything"), ("tied", "adamw", "by the CPU"),
            ("lstm", "adamw", "everything"), ("in_place", "adamw", "around"),
            ("batchnorm", "adamw", "again"), ("gpt2_frozen", "momentum", "weights"),
            ("vit", "adamw", "keep"),
        ],
    ),
)  # fmt: skip
def test_one_step_for_each_update(name: str, optimizer: str, way: str, tmp_path: Path) -> None:
    assert_right(hand_job(name, optimizer, way), tmp_path, f"{name}, {optimizer}, {way}")


@pytest.mark.parametrize(
    ("name", "way", "max_grad_norm"),
    some(
        product(("gpt2", "llama", "resnet", "tied"), WAYS, (0.1, float("inf"))),
        keep=[
            ("llama", "by the CPU, around", 0.1),
            ("gpt2", "disk", 0.1),
            ("tied", "by the CPU", float("inf")),
        ],
    ),
)
def test_clipping(name: str, way: str, max_grad_norm: float, tmp_path: Path) -> None:
    assert_right(hand_job(name, "adamw", way, max_grad_norm), tmp_path, f"{name}, {way}, {max_grad_norm}")


@pytest.mark.parametrize(
    ("name", "gradients", "cpu_updates", "max_grad_norm"),
    some(
        product(("gpt2", "llama", "batchnorm"), (False, True), (False, True), (None, 0.1)),
        keep=[("llama", False, True, 0.1), ("llama", True, True, 0.1)],
    ),
)
def test_several_micro_batches(
    name: str, gradients: bool, cpu_updates: bool, max_grad_norm: float | None, tmp_path: Path
) -> None:
    """Gradients wait on the device or in the lower tier."""
    way = Way(gradients=gradients, cpu_updates=cpu_updates, disk=3)
    case = f"{name}, {gradients}, {cpu_updates}, {max_grad_norm}"
    assert_right(summed_job(name, "adamw", way, max_grad_norm), tmp_path, case)

"""Ranks whose CPUs update what is offloaded train like DistributedDataParallel, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import some
from tests.sharding.all_at_once import ROOM, UPDATED_BYTES_PER_S, Found, Tiers, all_at_once
from tests.sharding.clipped_by_shards import clip_by_shards
from tests.sharding.planned_beside_ddp import train_ddp
from tests.sharding.processes import on_ranks
from tests.sharding.test_planned_equal_to_ddp import check_all

BUDGETS = {"normalized": "60%", "gpt2": "45%", "thick_llama_lora": "45%"}
"""Of what plain PyTorch takes: so little that parameters and states are offloaded, which the CPU then updates."""

LONG_S = 1200
"""Seconds that ranks may take which plan for a minute and more, on a machine that runs more than one thing."""

CASES = [
    ("normalized", "adamw"),
    ("gpt2", "adamw"),
    ("gpt2", "momentum"),
    ("thick_llama_lora", "adamw"),
    ("thick_llama_lora", "momentum"),
]


def _check(found: list[Found]) -> None:
    check_all([one.compared for one in found])
    for one in found:
        assert one.by_cpu, "the CPU updates nothing"
        assert one.down
        assert one.up


@pytest.mark.parametrize(("name", "optimizer"), some(CASES, keep=[("normalized", "adamw")]))
def test_two_ranks(name: str, optimizer: str, fit_stores: Path, tmp_path: Path) -> None:
    """Over five iterations, with dropout; the host has room for all that is offloaded."""
    tiers = Tiers(tmp_path, ROOM, UPDATED_BYTES_PER_S)
    _check(on_ranks(2, all_at_once, name, optimizer, BUDGETS[name], fit_stores, tiers, seconds=LONG_S))


CLIPPED = [
    ("gpt2", "adamw", 0.5, 1),
    ("gpt2", "momentum", 0.5, 2),
    ("normalized", "momentum", 0.05, 2),
    ("thick_llama_lora", "momentum", 0.02, 2),
]
"""Model, optimizer, limit, micro-batches of an update."""


@pytest.mark.parametrize(("name", "optimizer", "limit", "accumulate"), some(CLIPPED, keep=[]))
def test_clipping_that_bites(
    name: str, optimizer: str, limit: float, accumulate: int, fit_stores: Path, tmp_path: Path
) -> None:
    """The CPU clips too, once the norm is known; the reference adds the squares as shards have them."""
    more: dict[str, Any] = {"max_grad_norm": limit, "accumulate": accumulate}
    more["reference"] = partial(train_ddp, clip=clip_by_shards)
    tiers = Tiers(tmp_path, ROOM, UPDATED_BYTES_PER_S)
    found = on_ranks(2, all_at_once, name, optimizer, BUDGETS[name], fit_stores, tiers, more, seconds=LONG_S)
    _check(found)
    for one in found:
        own, expected = one.compared.norms
        assert own == expected > limit

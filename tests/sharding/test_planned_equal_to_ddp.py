"""Two ranks under one plan train like DistributedDataParallel, bit for bit: losses, parameters, states, buffers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharding.planned_beside_ddp import Compared, compare
from tests.sharding.processes import on_ranks

TIGHT = {"gpt2": "60%", "t5": "60%", "llama_lora": "60%", "resnet": "82%", "odd": "100%"}
"""Budgets of each recipe at which activations are recomputed."""

REGATHERED = "llama_lora"
"""At its budget a weight is gathered more than once."""


def check_all(found: list[Compared]) -> None:
    """Fail where a rank differs, or took more memory than its plan says."""
    for rank, one in enumerate(found):
        assert not one.differences, f"rank {rank}: {one.differences}"
        assert one.peak_bytes <= max(1.02 * one.predicted_bytes, one.predicted_bytes + (1 << 14)), rank


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("gpt2", "adamw"), ("t5", "adamw"), ("llama_lora", "momentum"), ("resnet", "momentum"), ("odd", "adamw")],
)
def test_two_ranks(name: str, optimizer: str, fit_stores: Path) -> None:
    found = on_ranks(2, compare, name, optimizer, TIGHT[name], fit_stores)
    check_all(found)
    for one in found:
        assert one.gathers >= one.distinct > 0
        assert name == "odd" or one.recomputes
        assert name != REGATHERED or one.gathers > one.distinct

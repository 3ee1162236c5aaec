"""Two ranks that freeze train like DistributedDataParallel with `requires_grad` set by the same masks, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sharding.frozen_beside_ddp import frozen_beside_ddp
from tests.sharding.planned_beside_ddp import Compared
from tests.sharding.processes import on_ranks
from tests.sharding.test_planned_equal_to_ddp import check_all


def _frozen(name: str, optimizer: str, budget: str, stores: Path, more: dict[str, Any]) -> Compared:
    return frozen_beside_ddp(name, optimizer, budget, stores, **more)


@pytest.mark.parametrize(
    ("name", "optimizer", "budget"), [("gpt2", "adamw", "150%"), ("llama_lora", "momentum", "60%")]
)
def test_two_ranks(name: str, optimizer: str, budget: str, fit_stores: Path) -> None:
    found = on_ranks(2, _frozen, name, optimizer, budget, fit_stores, {})
    for one in found:
        print(one)
    check_all(found)

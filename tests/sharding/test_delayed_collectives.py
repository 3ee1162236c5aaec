"""What a collective writes is not there before its wait: with all waits nothing changes, and without one much does.

On this machine collectives are often over before anything reads what they write, whether it waits or not. Here they
leave no number until the wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import some
from tests.sharding.late import Delay
from tests.sharding.planned_beside_ddp import Compared, compare
from tests.sharding.processes import on_ranks

ITERATIONS = 2


def delayed(name: str, optimizer: str, budget: str, stores: Path, lost: str) -> tuple[Compared, int]:
    """Compare with plain training on this rank, and count the collectives that were delayed."""
    with Delay(lost).all() as delay:
        found = compare(name, optimizer, budget, stores, iterations=ITERATIONS, more={"check": "never"})
    return found, delay.count


@pytest.mark.parametrize(
    ("name", "budget"),
    some([("odd", "100%"), ("gpt2", "60%"), ("llama_lora", "60%")], keep=[("odd", "100%")]),
)
def test_with_every_wait_nothing_changes(name: str, budget: str, fit_stores: Path) -> None:
    for found, count in on_ranks(2, delayed, name, "adamw", budget, fit_stores, ""):
        assert not found.differences
        assert count >= ITERATIONS * (found.gathers + 1)


@pytest.mark.parametrize("lost", ["gather", "scatter"])
def test_a_missing_wait_is_seen(lost: str, fit_stores: Path) -> None:
    for found, _ in on_ranks(2, delayed, "odd", "adamw", "100%", fit_stores, lost):
        assert any(difference.startswith("loss") for difference in found.differences)

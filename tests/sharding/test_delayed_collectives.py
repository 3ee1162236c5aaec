"""What a collective writes is not there before its wait: with all waits nothing changes, and without one much does.

On this machine collectives are often over before anything reads what they write, whether it waits or not. Here they
leave no number until the wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import some
from tests.sharding.all_at_once import ROOM, UPDATED_BYTES_PER_S, Found, Tiers, all_at_once
from tests.sharding.late import Delay, LateReloads
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


def _with_a_tier(stores: Path, folder: Path) -> list[Found]:
    """Train with all waits, then without those for a reload before a gather, then without one for a scatter before its
    gradient is offloaded."""

    def run(reload: str = "", scatter: str = "") -> Found:
        more = {"iterations": ITERATIONS, "more": {"check": "never"}}
        tiers = Tiers(folder, ROOM, UPDATED_BYTES_PER_S)
        with Delay("scatter" if scatter else "", scatter).all() as collectives, LateReloads(reload).all() as reloads:
            found = all_at_once("normalized", "adamw", "60%", stores, tiers, more)
        assert collectives.count >= ITERATIONS * (found.compared.gathers + 1)
        assert reloads.count >= ITERATIONS
        return found

    whole = run()
    # Where the CPU updates a parameter, its gradient is offloaded once the scatter is over.
    return [whole, run(reload=min(whole.reloaded_for_gathers)), run(scatter=min(whole.by_cpu))]


@pytest.mark.long
def test_reloads_and_offloads_between_collectives(fit_stores: Path, tmp_path: Path) -> None:
    """Reloads are late too: a gather waits for what it sends, and an offload for what a scatter leaves."""
    for whole, without_reload, without_scatter in on_ranks(2, _with_a_tier, fit_stores, tmp_path):
        assert not whole.compared.differences
        for found in (without_reload, without_scatter):
            assert any(difference.startswith("loss") for difference in found.compared.differences)

"""What a collective writes is not there before its wait: with all waits nothing changes, and without one much does.

On this machine collectives are often over before anything reads what they write, whether it waits or not. Here they
leave no number until the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.stages.runtime.sharding.ranks import Collective, Ranks
from tests.matrix import some
from tests.sharding.planned_beside_ddp import Compared, compare
from tests.sharding.processes import on_ranks

ITERATIONS = 2


class Late:
    """A collective whose result comes with the wait, or never."""

    def __init__(self, work: Collective, target: torch.Tensor, result: torch.Tensor, *, comes: bool) -> None:
        self._work, self._comes = work, comes
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = (target, result)
        target.fill_(float("nan"))

    def wait(self) -> None:
        self._work.wait()
        if self._kept is not None and self._comes:
            target, result = self._kept
            target.copy_(result)
        self._kept = None


class Delay:
    """Delays all collectives of steps; of the first kind of `lost`, those of one set of parameters never come."""

    def __init__(self, lost: str) -> None:
        self._lost, self._name, self.count = lost, "", 0

    def gather(self, real: Callable[..., Collective]) -> Callable[..., Any]:
        def late(ranks: Ranks, whole: torch.Tensor, shard: torch.Tensor, what: str) -> Late:
            result = torch.empty_like(whole)
            return Late(real(ranks, result, shard, what), whole, result, comes=self._comes("gather", what))

        return late

    def reduce(self, real: Callable[..., Collective]) -> Callable[..., Any]:
        def late(ranks: Ranks, whole: torch.Tensor, what: str) -> Late:
            result = whole.clone()
            return Late(real(ranks, result, what), whole, result, comes=self._comes("scatter", what))

        return late

    def _comes(self, kind: str, what: str) -> bool:
        self.count += 1
        if kind != self._lost:
            return True
        self._name = self._name or what
        return what != self._name


def delayed(name: str, optimizer: str, budget: str, stores: Path, lost: str) -> tuple[Compared, int]:
    """Compare with plain training on this rank, and count the collectives that were delayed."""
    delay = Delay(lost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "gather", delay.gather(Ranks.gather))
        patch.setattr(Ranks, "reduce", delay.reduce(Ranks.reduce))
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

"""Weights gathered again, activations recomputed and tensors offloaded in one plan: ranks train like DDP, bit for bit.

Both kinds of lower tier are tried: a disk alone, and host memory before a disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import some
from tests.sharding.all_at_once import Found, Tiers, all_at_once, beside_both
from tests.sharding.processes import on_ranks
from tests.sharding.test_planned_equal_to_ddp import check_all, check_near

BUDGETS = {
    ("gpt2", "disk"): ("40%", "40%"),
    ("gpt2", "host"): ("30%", "30%"),
    ("deep_llama_lora", "disk"): ("30%", "26%"),
    ("deep_llama_lora", "host"): ("30%", "21%"),
    ("wide_t5", "disk"): ("32%", "32%"),
    ("t5", "host"): ("35%", "35%"),
    ("resnet", "disk"): ("50%", "50%"),
    ("resnet", "host"): ("50%", "50%"),
}
"""Budgets with AdamW and with momentum, of what plain PyTorch takes, at which a plan does all three.

Buffers of the disk are part of the budget where it is the lower tier alone. Frozen weights always have a copy there, so
that plans of LoRA offload anything else only where little room is left.
"""

OPTIMIZERS = ("adamw", "momentum")

HOST_BYTES = 40_000
"""Room in the host: less than is offloaded."""

CASES = [(name, optimizer, tier) for name, tier in BUDGETS for optimizer in OPTIMIZERS]


def _arguments(name: str, optimizer: str, tier: str, folder: Path) -> tuple[str, Tiers]:
    budget = BUDGETS[name, tier][OPTIMIZERS.index(optimizer)]
    return budget, Tiers(folder) if tier == "disk" else Tiers(folder, HOST_BYTES)


def _check(found: list[Found], tier: str) -> None:
    check_all([one.compared for one in found])
    for one in found:
        assert one.gathered_again, "no weight is gathered again in backward"
        assert one.recomputed, "no activation is recomputed"
        for place in ("disk",) if tier == "disk" else ("disk", "host"):
            assert one.down[place], f"nothing is offloaded to the {place}"
            assert one.up[place], f"nothing is reloaded from the {place}"


@pytest.mark.parametrize(("name", "optimizer", "tier"), some(CASES, keep=[("gpt2", "adamw", "host")]))
def test_two_ranks(name: str, optimizer: str, tier: str, fit_stores: Path, tmp_path: Path) -> None:
    budget, tiers = _arguments(name, optimizer, tier, tmp_path)
    _check(on_ranks(2, all_at_once, name, optimizer, budget, fit_stores, tiers), tier)


FOUR_S = 1200
"""Seconds for four ranks, which plan, and train twice, where there may be one core for all."""

FOUR = [(name, optimizer) for name, tier in BUDGETS if tier == "host" for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("name", "optimizer"), some(FOUR, keep=[]))
def test_four_ranks(name: str, optimizer: str, fit_stores: Path, tmp_path: Path) -> None:
    """They equal the same collectives on whole gradients; DistributedDataParallel adds in another order."""
    budget, tiers = _arguments(name, optimizer, "host", tmp_path)
    found = on_ranks(4, beside_both, name, optimizer, budget, fit_stores, tiers, seconds=FOUR_S)
    _check([same for same, _ in found], "host")
    for _, near in found:
        check_near(near.compared)


MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "adamw", {"accumulate": 2}),
    ("gpt2", "momentum", {"accumulate": 3}),
]


@pytest.mark.parametrize("number", some(range(len(MORE)), keep=[]))
def test_micro_batches_with_a_lower_tier(number: int, fit_stores: Path, tmp_path: Path) -> None:
    name, optimizer, more = MORE[number]
    found = on_ranks(2, all_at_once, name, optimizer, "48%", fit_stores, Tiers(tmp_path, HOST_BYTES), more)
    check_all([one.compared for one in found])
    for one in found:
        assert one.down
        assert one.up


NORM_BOUND = 1e-6
"""Relative: squares are added in another order than DistributedDataParallel's."""

PARAMETER_BOUND = 1e-5
"""Relative, after five updates of what a norm with that bound has clipped."""

NO_GRADIENT = "attn.c_attn.bias"
"""A part of it is added to all keys, which changes nothing: its gradient is rounding alone, of which AdamW makes
updates as large as any other's."""


@pytest.mark.parametrize("optimizer", some(["adamw", "momentum"], keep=[]))
def test_clipping_with_a_lower_tier(optimizer: str, fit_stores: Path, tmp_path: Path) -> None:
    clipped = {"max_grad_norm": 0.5}
    found = on_ranks(2, all_at_once, "gpt2", optimizer, "45%", fit_stores, Tiers(tmp_path, HOST_BYTES), clipped)
    for one in found:
        own, expected = one.compared.norms
        assert one.down
        assert own > 0.5
        assert abs(own - expected) <= NORM_BOUND * expected
        apart = {
            n: v for n, v in one.compared.largest.items() if not (optimizer == "adamw" and n.endswith(NO_GRADIENT))
        }
        assert max(apart.values(), default=0.0) <= PARAMETER_BOUND

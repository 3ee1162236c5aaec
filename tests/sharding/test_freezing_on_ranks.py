"""Two ranks that freeze train like DistributedDataParallel with `requires_grad` set by the same masks, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from stowage.flows import Lossy, fit
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.workload.samples import sample_batch
from tests.configurations.alongside import small_gpt2
from tests.freezing.beside import Given, assert_worst_measured, freeze
from tests.matrix import some
from tests.sharding.all_at_once import ROOM, UPDATED_BYTES_PER_S, Found, Tiers
from tests.sharding.all_at_once import look as see
from tests.sharding.codes_beside_ddp import first_lossy
from tests.sharding.frozen_beside_ddp import frozen_beside_ddp
from tests.sharding.planned_beside_ddp import Compared
from tests.sharding.processes import on_ranks
from tests.sharding.test_planned_equal_to_ddp import NORM_BOUND, PARAMETER_BOUND, check_all


def _frozen(name: str, optimizer: str, budget: str, stores: Path, more: dict[str, Any]) -> Compared:
    return frozen_beside_ddp(name, optimizer, budget, stores, **more)


CASES: list[tuple[str, str, str, UnitKind]] = [
    ("gpt2", "adamw", "150%", "saving"),
    ("gpt2", "momentum", "65%", "saving"),
    ("llama_lora", "momentum", "60%", "saving"),
    ("gpt2", "adamw", "65%", "parameter"),
    ("t5", "adamw", "65%", "block"),
    ("resnet", "momentum", "85%", "saving"),
    ("odd", "adamw", "120%", "parameter"),
    ("mixer", "adamw", "110%", "saving"),
    ("windows", "adamw", "110%", "parameter"),
]


@pytest.mark.parametrize(("name", "optimizer", "budget", "kind"), some(CASES, keep=[CASES[0]]))
def test_two_ranks(name: str, optimizer: str, budget: str, kind: UnitKind, fit_stores: Path) -> None:
    """Over ten iterations, with dropout, every mask from none to all of the units."""
    found = on_ranks(2, _frozen, name, optimizer, budget, fit_stores, {"kind": kind})
    check_all(found)
    for one in found:
        assert len(one.losses) == 10
        assert int(budget[:-1]) > 100 or one.recomputes
        assert name != "llama_lora" or one.gathers > one.distinct, "no weight is gathered again"


@pytest.mark.parametrize(
    ("name", "optimizer"), some([("resnet", "momentum"), ("gpt2", "adamw")], keep=[("gpt2", "adamw")])
)
def test_gradients_of_micro_batches_wait(name: str, optimizer: str, fit_stores: Path) -> None:
    """All micro-batches of an update have one mask."""
    check_all(on_ranks(2, _frozen, name, optimizer, "120%", fit_stores, {"accumulate": 2, "iterations": 7}))


def test_the_global_norm_is_of_the_gradients_that_are_there(fit_stores: Path) -> None:
    """The fifth mask has everything, the last nothing; the bounds are those without freezing."""
    more = {"max_grad_norm": 0.05, "iterations": 7}
    found = on_ranks(2, _frozen, "odd", "momentum", "120%", fit_stores, more)
    found += on_ranks(2, _frozen, "odd", "momentum", "120%", fit_stores, more | {"iterations": 5})
    assert [one.norms for one in found[:2]] == [(0.0, 0.0)] * 2
    assert found[2].norms[0] == found[3].norms[0]
    for one in found[2:]:
        own, expected = one.norms
        assert own > 0.05
        assert abs(own - expected) <= NORM_BOUND * expected
        assert max(one.largest.values(), default=0.0) <= PARAMETER_BOUND


def _with_tiers(name: str, optimizer: str, budget: str, stores: Path, tiers: Tiers, more: dict[str, Any]) -> Found:
    found = Found(Compared([], []))
    with tiers.used(), patch("stowage.stages.solve.frozen.HALVINGS", 1):  # each takes half a minute
        found.compared = frozen_beside_ddp(name, optimizer, budget, stores, see=lambda step: see(step, found), **more)
    return found


@pytest.mark.parametrize("tier", some(["host", "disk"], keep=[]))
def test_a_lower_tier(tier: str, fit_stores: Path, tmp_path: Path) -> None:
    """Shards of frozen units stay where they are; weights are gathered again, activations recomputed and offloaded."""
    tiers = Tiers(tmp_path, 40_000 if tier == "host" else None)
    for one in on_ranks(2, _with_tiers, "gpt2", "adamw", "35%", fit_stores, tiers, {}):
        check_all([one.compared])
        assert one.down
        assert one.up
        assert one.gathered_again or one.recomputed


EVERYTHING_S = 1800
"""Seconds for ranks that plan a step of each micro-batch, on a machine that runs more than one thing."""


def _everything(stores: Path, tiers: Tiers | None) -> Found:
    """LoRA, codes, micro-batches, freezing and recomputation between ranks; with `tiers` offloading too."""
    lossy = {"lossy": Lossy(["bf16", "int8_tensor"], 0.1)}
    more: dict[str, Any] = {"accumulate": 2, "iterations": 6, "codes": True, "more": lossy}
    with (
        patch.object(saved_module, "SMALLEST", 64),
        patch("stowage.flows.planning.step.solve_variants", first_lossy),
        patch("stowage.stages.solve.frozen.HALVINGS", 1),  # a step of each micro-batch is planned, and of each budget
    ):
        if tiers is not None:
            return _with_tiers("thick_llama_lora", "adamw", "45%", stores, tiers, more)
        found = Found(Compared([], []))
        found.compared = frozen_beside_ddp(
            "llama_lora", "adamw", "80%", stores, see=lambda step: see(step, found), **more
        )
    return found


@pytest.mark.long
def test_freezing_codes_adapters_and_micro_batches_at_once(fit_stores: Path) -> None:
    for found in on_ranks(2, _everything, fit_stores, None, seconds=EVERYTHING_S):
        check_all([found.compared])
        assert not found.exact


@pytest.mark.long
def test_offloading_and_updates_by_the_cpu_too(fit_stores: Path, tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, ROOM, UPDATED_BYTES_PER_S)
    for found in on_ranks(2, _everything, fit_stores, tiers, seconds=EVERYTHING_S):
        check_all([found.compared])
        assert not found.exact
        assert found.down
        assert found.up
        assert found.by_cpu, "the CPU updates nothing"


def _worst(stores: Path, budget: str, kind: UnitKind) -> tuple[int, int]:
    """A model whose layers take more than what measuring rounds; each unit trains once before."""
    sizes = {"n_layer": 4, "n_embd": 128, "n_positions": 64}
    model, policy = small_gpt2(**sizes), Given(most=2)
    batch = sample_batch(model, 8, 64, dist.get_rank())
    step = fit(
        model,
        batch,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device_budget=budget,
        cache_dir=stores,
        quick=True,
        group=dist.group.WORLD,
        freeze=freeze(policy, units=kind),
        say=lambda text: None,
    )
    assert_worst_measured(step, policy, batch)
    return step.plan.device_peak_bytes, step.plan.all_active_bytes


@pytest.mark.parametrize("kind", some(["saving", "block"], keep=["saving"]))
@pytest.mark.parametrize("budget", some(["150%", "60%"], keep=[]))
def test_the_worst_mask_takes_what_was_predicted(budget: str, kind: UnitKind, fit_stores: Path) -> None:
    for worst, everything in on_ranks(2, _worst, fit_stores, budget, kind):
        assert worst < everything

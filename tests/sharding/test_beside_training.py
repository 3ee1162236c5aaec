"""What is done with a sharded model besides training: evaluation, lending it whole, comparing with plain PyTorch."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import OffloadedError, StaleStep
from tests.matrix import some
from tests.sharding.all_at_once import Tiers
from tests.sharding.planned_beside_ddp import train_ddp
from tests.sharding.processes import on_ranks
from tests.sharding.recipes import RECIPES, Recipe, adamw

SCALE = "STOWAGE_TEST_SCALE_OF_RANK"
"""A variable of the environment: no trace looks there."""

HOST_BYTES = 1 << 16
"""Less than what is offloaded, so that the disk has some of it."""


def _recipe() -> Recipe:
    found = RECIPES["resnet"]()
    return Recipe(found.model, lambda outputs, _batch: outputs.pow(2).mean() * float(os.environ[SCALE]), found.batch)


def _fit(recipe: Recipe, stores: Path, **more: Any) -> Any:
    return fit(
        recipe.model,
        recipe.batch(dist.get_rank()),
        adamw(recipe.model.parameters()),
        loss=recipe.loss,
        quick=True,
        cache_dir=stores,
        group=dist.group.WORLD,
        **{"device_budget": "4MiB"} | more,
    )


def _beside(stores: Path, tiers: Tiers | None) -> dict[str, Any]:
    with tiers.used() if tiers is not None else nullcontext():
        return _found(stores, {"device_budget": "70%"} if tiers is not None else {})


def _found(stores: Path, more: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    recipe = RECIPES["normalized"]()
    plain = copy.deepcopy(recipe.model)
    beside = adamw(plain.parameters())
    ddp = nn.parallel.DistributedDataParallel(plain)
    step = _fit(recipe, stores, check="always", **more)
    found: dict[str, Any] = {"offloads": bool(more) == any(row.action == "offload" for row in step.planned.rows)}

    def train(count: int, offset: int) -> bool:
        moved = Recipe(recipe.model, recipe.loss, lambda number: recipe.batch(number + offset))
        torch.manual_seed(offset)
        expected = list(train_ddp(moved, beside, ddp, iterations=count))
        torch.manual_seed(offset)
        given = [step(moved.batch(1000 * i + rank)).item() for i in range(count)]
        return given == expected

    found["before"] = train(2, 0)
    other = recipe.batch(77 + rank)
    before = {name: buffer.clone() for name, buffer in recipe.model.named_buffers()}
    with torch.no_grad():
        plain.eval()
        expected = plain(**other)
        plain.train()
    found["evaluation"] = [torch.equal(step.evaluate(other), expected) for _ in range(2)]
    found["unchanged"] = all(torch.equal(before[n], b) for n, b in recipe.model.named_buffers())
    try:
        recipe.model(**other)
        found["called"] = "nothing"
    except OffloadedError as error:
        found["called"] = str(error)
    with step.on_device() as model:
        found["whole"] = all(
            torch.equal(own, reference)
            for (_, own), (_, reference) in zip(model.named_parameters(), plain.named_parameters())
        )
        model.eval()
        with torch.no_grad():
            found["forward"] = torch.equal(model(**other), expected)
        model.train()
        whole = {id(p): s["exp_avg"] for p, s in step.optimizer.state.items()}
        found["states"] = all(
            torch.equal(whole[id(own)], beside.state[reference]["exp_avg"])
            for own, reference in zip(model.parameters(), plain.parameters())
        )
        for parameters in (model.parameters(), plain.parameters()):
            for parameter in parameters:
                parameter.data.mul_(0.5)
        for optimizer in (step.optimizer, beside):
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.25)
    found["after"] = train(2, 5)
    with step.on_device():
        found["end"] = all(torch.equal(a, b) for a, b in zip(recipe.model.parameters(), plain.parameters()))
    return found


def _stale(stores: Path) -> list[str]:
    """A number that no trace sees changes on rank 1 alone."""
    os.environ[SCALE] = "1.0"
    recipe = _recipe()
    step = _fit(recipe, stores, check="always")
    batch = recipe.batch(dist.get_rank())
    step(batch)
    os.environ[SCALE] = str(1.0 + dist.get_rank())
    said = []
    for _ in range(2):
        try:
            step(batch)
            said.append("")
        except StaleStep as error:
            said.append(str(error))
        os.environ[SCALE] = "2.0"
    return said


def _check(found: dict[str, Any]) -> None:
    called = found.pop("called")
    assert "step.on_device()" in called
    assert found.pop("evaluation") == [True, True]
    assert all(found.values()), found


@pytest.mark.parametrize("tier", some(["none", "disk", "host and disk"], keep=["disk"]))
def test_evaluation_lending_and_the_comparison(tier: str, fit_stores: Path, tmp_path: Path) -> None:
    tiers = None if tier == "none" else Tiers(tmp_path, HOST_BYTES if tier == "host and disk" else None)
    for found in on_ranks(2, _beside, fit_stores, tiers):
        _check(found)


def test_a_step_that_is_stale_on_one_rank_is_found_on_all(fit_stores: Path) -> None:
    first, second = on_ranks(2, _stale, fit_stores)
    assert first[0].startswith("Rank 1: The planned step gave the loss")
    assert second[0].startswith("The planned step gave the loss")
    assert first[1] == second[1] == ""

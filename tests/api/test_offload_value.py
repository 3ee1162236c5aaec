"""`Offload(dir, host=…, disk=…)`: one value for where tensors may live, and the three arguments that it replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Offload, best_batch, fit
from stowage.flows.api.offload import offload_of
from stowage.stages.ir.errors import ParameterError
from tests.api.wide_network import BATCH, adamw, loss_of, network

BUDGET = "70%"


def trained(stores: Path, **places: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses and weights of three iterations within the budget, and the plan."""
    model = network()
    step = fit(
        model,
        BATCH,
        adamw,
        loss=loss_of,
        device_budget=BUDGET,
        method="offmate",
        cache_dir=stores,
        quick=True,
        **places,
    )
    torch.manual_seed(1)
    losses = [step(BATCH).item() for _ in range(3)]
    with step.on_device() as whole:
        return losses, [p.detach().clone() for p in whole.parameters()], step.plan


def test_it_plans_and_trains_as_the_three_arguments_do(fit_stores: Path, tmp_path: Path) -> None:
    one, weights, plan = trained(fit_stores, offload=Offload(tmp_path / "one", disk="1GiB"))
    other, same, loose = trained(fit_stores, offload_dir=tmp_path / "two", disk_budget="1GiB")
    assert plan.plan_hash == loose.plan_hash
    assert plan.offload_bytes > 0
    assert one == other
    assert all(map(torch.equal, weights, same))


def test_both_are_one_sentence() -> None:
    for name in ("offload_dir", "host_budget", "disk_budget"):
        with pytest.raises(ParameterError, match=f"Both offload and {name} say where tensors may live") as caught:
            fit(nn.Linear(2, 2), BATCH, device_budget="1GiB", offload=Offload("here"), **{name: "1GiB"})  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_errors_name_what_was_written(fit_stores: Path, tmp_path: Path) -> None:
    def refused(**places: Any) -> str:
        with pytest.raises(ParameterError) as caught:
            fit(network(), BATCH, adamw, loss=loss_of, device_budget=BUDGET, cache_dir=fit_stores, **places)
        return str(caught.value)

    assert "offload.host is for models on a GPU" in refused(offload=Offload(tmp_path, host="8GiB"))
    assert "host_budget is for models on a GPU" in refused(offload_dir=tmp_path, host_budget="8GiB")
    assert "offload.disk needs offload.dir" in refused(offload=Offload(disk="1GiB"))
    assert "disk_budget needs offload_dir" in refused(disk_budget="1GiB")
    assert "offload.disk is" in refused(offload=Offload(tmp_path, disk="1,5GiB"))
    assert "give Offload(dir, host=…, disk=…)" in refused(offload=tmp_path)


@pytest.mark.parametrize("wrong", [{"dir": 3}, {"dir": ""}, {"host": 1.5}, {"disk": True}])
def test_an_attribute_of_another_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=f"offload.{next(iter(wrong))} is"):
        Offload(**wrong)


def test_a_place_or_none() -> None:
    assert not Offload().anywhere
    assert not offload_of(None).anywhere
    assert not Offload(disk="1GiB").anywhere
    assert Offload("here").anywhere
    assert offload_of(None, host_budget="1GiB").anywhere
    assert offload_of(Offload("here", disk=5)) == Offload("here", disk=5)


def test_best_batch_takes_it(fit_stores: Path, tmp_path: Path) -> None:
    def chosen(**places: Any) -> Any:
        return best_batch(
            network(), BATCH, adamw, loss=loss_of, device_budget=BUDGET, largest=16, cache_dir=fit_stores, quick=True,
            costs="roofline", **places,
        )  # fmt: skip

    assert chosen(offload=Offload(tmp_path)).batch_size == chosen(offload_dir=tmp_path).batch_size

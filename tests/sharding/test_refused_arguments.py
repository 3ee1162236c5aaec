"""What ranks cannot train together is refused in one sentence, and model and optimizer stay as they were."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage import fit, shard
from stowage.flows.api import budget
from stowage.stages.ir.errors import MIB, ParameterError, StowageError
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.solve.free import LEAST_RESERVE_BYTES, Free
from tests.sharding.processes import on_ranks

FREE = 8 << 30


def _mean(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 16)


def _stepped_by_rprop(stores: Path) -> str:
    model, batch = _made()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    with pytest.raises(ParameterError) as refusal:
        shard(
            model,
            batch,
            optimizer,
            device_budget="1GiB",
            loss=_mean,
            choices=lambda groups, *_: [GroupChoice(g.group, False, False) for g in groups],
            cache_dir=stores,
        )
    assert all(type(p) is nn.Parameter and torch.equal(p, before[name]) for name, p in model.named_parameters())
    _mean(model(batch), batch).backward()
    optimizer.step()
    return str(refusal.value)


def test_an_optimizer_that_cannot_step_shards(fit_stores: Path) -> None:
    """Rprop goes element by element, but not with the tensors that FSDP2 makes."""
    for text in on_ranks(2, _stepped_by_rprop, fit_stores):
        assert text.startswith("Rprop cannot step the shards that fully_shard makes (RuntimeError: aten."), text
        assert text.endswith("take another optimizer, such as AdamW, SGD or Lion, or train with fit and group.")


def _outside_of_the_group(stores: Path) -> list[str]:
    group = dist.new_group([1])
    said: list[str] = []
    for one in (group, "world") if dist.get_rank() == 0 else ():
        for work in (partial(fit, quick=True), shard):
            model, batch = _made()
            optimizer = torch.optim.AdamW(model.parameters())
            given: Any = {"device_budget": "1GiB", "loss": _mean, "group": one, "cache_dir": stores}
            with pytest.raises(ParameterError) as refusal:
                work(model, batch, optimizer, **given)
            said.append(str(refusal.value))
    dist.barrier()
    return said


def test_a_process_that_is_not_in_the_group(fit_stores: Path) -> None:
    outside, none = on_ranks(2, _outside_of_the_group, fit_stores)
    assert none == []
    assert [text.split(":")[0] for text in outside] == [
        *["This process is not in group"] * 2,
        *["group is 'world', which is no process group"] * 2,
    ]


def _given_wrong(stores: Path) -> list[str]:
    def kept(groups: Any) -> list[GroupChoice]:
        return [GroupChoice(g.group, False, True) for g in groups]

    wrong = [
        lambda groups, *_: None,
        lambda groups, *_: kept(groups)[:-1],
        lambda groups, *_: [*kept(groups), GroupChoice(99, False, True)],
        lambda groups, *_: [*kept(groups), kept(groups)[0]],
        lambda groups, *_: [(False, True) for _ in groups],
    ]
    said = []
    for choose in wrong:
        model, batch = _made()
        with pytest.raises((ParameterError, StowageError)) as refusal:
            shard(model, batch, None, device_budget="1GiB", loss=_mean, choices=choose, cache_dir=stores)
        said.append(str(refusal.value))
    return said


def test_choices_that_are_not_one_for_each_group(fit_stores: Path) -> None:
    first, second = on_ranks(2, _given_wrong, fit_stores)
    assert [text.split(": return one GroupChoice")[0] for text in first] == [
        "choices returned None",
        "choices returned no choice for group 2 (2)",
        "choices returned a choice for group 99, which is none",
        "choices returned two choices for group 0",
        "choices returned (False, True) for a group",
    ]
    assert all(text.startswith("Rank 0 could not plan: ParameterError: choices returned") for text in second)


def _with_gradients(stores: Path) -> dict[str, Any]:
    model, batch = _made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        _mean(model(batch), batch).backward()
    given: dict[str, Any] = {"device_budget": "1GiB", "loss": _mean, "cache_dir": stores}
    with pytest.raises(StowageError) as refusal:
        fit(model, batch, optimizer, quick=True, group=dist.group.WORLD, **given)
    assert (model[0].weight.grad is not None) == (dist.get_rank() == 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard(model, batch, optimizer, **given)
    said = [str(w.message) for w in caught if "is dropped" in str(w.message)]
    return {"fit": str(refusal.value), "shard": said, "rank": dist.get_rank()}


def test_gradients_that_sharding_drops_are_named(fit_stores: Path) -> None:
    for said in on_ranks(2, _with_gradients, fit_stores):
        assert "arameter '0.weight' has a gradient" in said["fit"]
        expected = ["The gradient of parameter '0.weight' and of 3 more is dropped, as its"] if said["rank"] else []
        assert [text.split(" parameter is a shard now")[0] for text in said["shard"]] == expected


class _WithNothing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 4)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def _no_elements(stores: Path) -> tuple[str, bool]:
    model, batch = _WithNothing(), torch.randn(8, 16)
    given: dict[str, Any] = {"device_budget": "1GiB", "loss": _mean, "cache_dir": stores}
    with pytest.raises(ParameterError) as refusal:
        shard(model, batch, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    return str(refusal.value), all(type(p) is nn.Parameter for p in model.parameters())


def test_a_parameter_without_elements(fit_stores: Path) -> None:
    for said, plain in on_ranks(2, _no_elements, fit_stores):
        assert said.startswith("Parameter nothing of shape (0, 3) has no elements")
        assert plain


def _budget_of_what_is_free(stores: Path) -> tuple[int, str]:
    model, batch = _made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    free = Free(FREE - dist.get_rank() * MIB, "this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "free_ram", lambda: free)
        given: dict[str, Any] = {"loss": _mean, "group": dist.group.WORLD, "cache_dir": stores, "quick": True}
        step = fit(model, batch, optimizer, device_budget="auto", **given)
    return step.plan.device_budget_bytes, str(vars(step.plan))


def test_ranks_divide_the_memory_that_they_share(fit_stores: Path) -> None:
    (first, said), (second, _) = on_ranks(2, _budget_of_what_is_free, fit_stores)
    least = (FREE - MIB) // 2 - LEAST_RESERVE_BYTES
    assert first == second
    assert least <= first < least + MIB // 2, "the least of all ranks"
    assert "for each of the 2 ranks there" in said


def _fitted_before(stores: Path) -> list[str]:
    model, batch = _made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"device_budget": "1GiB", "loss": _mean, "group": dist.group.WORLD, "cache_dir": stores}
    step = fit(model, batch, optimizer, quick=True, **given)
    said = []
    for work in (partial(fit, quick=True), shard):
        with pytest.raises(ParameterError) as refusal:
            work(model, batch, optimizer, **given)
        said.append(str(refusal.value))
    step(batch)
    return said


def test_a_model_that_is_fitted_already(fit_stores: Path) -> None:
    for said in on_ranks(2, _fitted_before, fit_stores):
        assert all(text.startswith("Parameter '0.weight' is dealt out to ranks: a step that was made") for text in said)

"""Ranks that are about to do different things all say so, in one sentence that names the rank, and nobody waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from stowage.flows import fit, shard
from stowage.flows.api import several_ranks
from stowage.flows.api.sharding.plan import ShardPlan
from stowage.flows.planning.planned import Planned
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.runtime.program import source_hash
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.matrix import some
from tests.optimizers.kinds import GlobalNorm, Lamb
from tests.sharding.processes import on_ranks

Say = Callable[[], Any]


def _net(width: int = 8, factor: float = 1.0) -> nn.Sequential:
    class Times(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), Times(), nn.Linear(width, 1))


def _square(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def _sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def _given(model: nn.Module, optimizer: Any) -> Any:
    return None if optimizer == "none" else optimizer or _sgd(model)


def _fit(model: nn.Module, stores: Path, batch: Any = None, optimizer: Any = None, **more: Any) -> Any:
    settings: Mapping[str, Any] = {"device_budget": "1GiB", "loss": _square, "quick": True, "group": dist.group.WORLD}
    batch = torch.randn(6, 4) if batch is None else batch
    return fit(model, batch, _given(model, optimizer), cache_dir=stores, **{**settings, **more})


def _shard(model: nn.Module, stores: Path, batch: Any = None, optimizer: Any = None, **more: Any) -> Any:
    settings: Mapping[str, Any] = {"device_budget": "1GiB", "loss": _square}
    batch = torch.randn(6, 4) if batch is None else batch
    return shard(model, batch, _given(model, optimizer), cache_dir=stores, **{**settings, **more})


def _said(work: Say) -> str:
    try:
        work()
    except StowageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _at_the_start(stores: Path) -> dict[str, str]:
    """What `fit` says where rank 1 is given something else; the ranks go on after each."""
    one = dist.get_rank() == 1
    frozen = _net()
    frozen[0].requires_grad_(not one)
    return {
        "budget": _said(lambda: _fit(_net(), stores, device_budget="1GiB" if one else "2GiB")),
        "batch": _said(lambda: _fit(_net(), stores, torch.randn(7 if one else 6, 4))),
        "shape": _said(lambda: _fit(_net(9 if one else 8), stores)),
        "frozen": _said(lambda: _fit(frozen, stores)),
        "clipping": _said(lambda: _fit(_net(), stores, max_grad_norm=1.0 if one else None)),
        "number": _said(lambda: _fit(_net(factor=3.0 if one else 2.0), stores)),
    }


DIFFERENCES = {
    "torch": ("version of torch", "2.0.1", "2.0.0"),
    "stowage": ("version of stowage", "2.0.1", "2.0.0"),
    "class": ("optimizer", "torch.optim.adamw:AdamW", "torch.optim.sgd:SGD"),
    "rate": ("optimizer", "lr=0.2 in group 0", "lr=0.1 in group 0"),
    "tensor rate": ("optimizer", "lr=float32[] 0.25 in group 0", "lr=float32[] 0.5 in group 0"),
    "momentum": ("optimizer", "momentum=0.9 in group 0", "momentum=0 in group 0"),
    "groups": ("optimizer", "group 0 of 0.weight, 0.bias", "group 0 of 0.weight, 0.bias, 3.weight, 3.bias"),
    "states": ("optimizer", "states of 4 parameters", "states of 0 parameters"),
    "whole tensors": ("optimizer", "tests.optimizers.kinds:Lamb", "torch.optim.sgd:SGD"),
    "budget": ("device_budget", "'1GiB'", "'2GiB'"),
    "parameters": ("list of parameters", "0.weight (9, 4) float32", "0.weight (8, 4) float32"),
    "type of parameters": ("list of parameters", "0.weight (8, 4) float64", "0.weight (8, 4) float32"),
    "frozen": ("list of parameters", "0.weight (8, 4) float32 frozen", "0.weight (8, 4) float32"),
    "buffers": ("list of buffers", "count (2,) float32", "count (1,) float32"),
}
"""Case -> what differs, on rank 1, and on rank 0."""


def _said_of_both(begin: Callable[..., Any], stores: Path) -> dict[str, str]:
    """What `fit` or `shard` says of what both compare; rank 1 is given something else each time."""
    one = dist.get_rank() == 1

    def version(where: Any) -> str:
        with mock.patch.object(where, "__version__", "2.0.1" if one else "2.0.0"):
            return _said(lambda: begin(_net(), stores))

    def optimizer(usual: Say, other: Say) -> str:
        return _said(lambda: begin(model := _net(), stores, None, (other if one else usual)(model)))

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        first, second = model[0].parameters(), model[3].parameters()
        return torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)

    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters())
        model(torch.randn(6, 4)).sum().backward()
        made.step()
        made.zero_grad()
        return made

    frozen = _net()
    frozen[0].requires_grad_(not one)
    buffer = _net()
    buffer.register_buffer("count", torch.zeros(2 if one else 1))
    return {
        "torch": version(torch),
        "stowage": version(several_ranks),
        "class": optimizer(_sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)),
        "rate": optimizer(_sgd, lambda model: _sgd(model, lr=0.2)),
        "tensor rate": optimizer(
            lambda model: _sgd(model, lr=torch.tensor(0.5)), lambda model: _sgd(model, lr=torch.tensor(0.25))
        ),
        "momentum": optimizer(_sgd, lambda model: _sgd(model, momentum=0.9)),
        "groups": optimizer(_sgd, groups),
        "states": optimizer(lambda model: torch.optim.AdamW(model.parameters()), stepped),
        "whole tensors": optimizer(_sgd, lambda model: Lamb(model.parameters())),
        "no optimizer": optimizer(_sgd, lambda model: "none"),
        "budget": _said(lambda: begin(_net(), stores, device_budget="1GiB" if one else "2GiB")),
        "not a budget": _said(lambda: begin(_net(), stores, device_budget=None if one else "2GiB")),
        "parameters": _said(lambda: begin(_net(9 if one else 8), stores)),
        "type of parameters": _said(lambda: begin(_net().double() if one else _net(), stores)),
        "frozen": _said(lambda: begin(frozen, stores)),
        "buffers": _said(lambda: begin(buffer, stores)),
    }


def _shards_of_another_batch(stores: Path) -> dict[str, str]:
    """What `shard` says where rank 1 has another batch or buffers that are not handed out."""
    one = dist.get_rank() == 1
    batch = torch.randn(6, 4)
    already = _net()
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32 if one else None)
    if one:
        fully_shard(already, mesh=DeviceMesh.from_group(dist.new_group([1], use_local_synchronization=True), "cpu"))
    return {
        "rows": _said(lambda: _shard(_net(), stores, batch[:5] if one else batch)),
        "dtype": _said(lambda: _shard(_net(), stores, batch.double() if one else batch)),
        "names": _said(lambda: _shard(_net(), stores, {"input": batch} if one else batch)),
        "buffers": _said(lambda: _shard(_net(), stores, broadcast_buffers=not one)),
        "precision": _said(lambda: _shard(_net(), stores, mixed_precision=precision)),
        "sharded": _said(lambda: _shard(already, stores, optimizer="none")),
    }


def _later(stores: Path) -> dict[str, str]:
    """What a step says where ranks call it differently; the step goes on after each."""
    one = dist.get_rank() == 1
    step = _fit(_net(), stores, accumulate=2, new_shapes="quick", check="never")
    batch = torch.randn(6, 4)
    step(batch, update=False)
    step(batch)
    if one:
        step.programs.forget()
    found = {"plan": _said(lambda: step(batch, update=False))}
    step.programs.forget()
    found["nothing to evaluate"] = _said(lambda: step.evaluate(batch) if one else step(batch, update=False))
    step(batch, update=False)
    step(batch)
    found |= {
        "batch": _said(lambda: step(batch[:5] if one else batch, update=False)),
        "dtype": _said(lambda: step(batch.double() if one else batch, update=False)),
        "more": _said(lambda: step((batch,) if one else batch, update=False)),
        "update": _said(lambda: step(batch, update=one)),
        "evaluate": _said(lambda: step.evaluate(batch) if one else step(batch, update=False)),
        "fine": _said(lambda: step(batch, update=False)),
    }
    step(batch)
    found["losses"] = str([step(batch, update=False).item() > 0, step(batch).item() > 0])
    return found


def test_at_the_start(fit_stores: Path) -> None:
    first, second = on_ranks(2, _at_the_start, fit_stores)
    assert first == second
    assert first["budget"] == (
        "RankError: Rank 1 has another device_budget than rank 0: '1GiB', not '2GiB'; give all ranks the same."
    )
    assert first["batch"] == (
        "RankError: Rank 1 has another batch than rank 0: (7, 4), not (6, 4); give all ranks the same."
    )
    assert first["shape"] == (
        "RankError: Rank 1 has another list of parameters than rank 0: 0.weight (9, 4) float32, not 0.weight (8, 4) "
        "float32; give all ranks the same."
    )
    assert "0.weight (8, 4) float32 frozen, not 0.weight (8, 4) float32;" in first["frozen"]
    assert "another max_grad_norm than rank 0: 1.0, not None" in first["clipping"]
    assert first["number"].startswith("RankError: Rank 1 has another traced step than rank 0:")
    assert "3.0" in first["number"]


@pytest.mark.parametrize(
    ("begin", "error"), some([(_fit, "RankError"), (_shard, "ParameterError")], keep=[(_fit, "RankError")])
)
def test_what_both_ways_compare(begin: Callable[..., Any], error: str, fit_stores: Path) -> None:
    first, second = on_ranks(2, _said_of_both, begin, fit_stores)
    for found in (first, second):
        alone = {name: found.pop(name) for name in ("not a budget", "no optimizer")}
        assert found == {
            name: f"{error}: Rank 1 has another {what} than rank 0: {one}, not {other}; give all ranks the same."
            for name, (what, one, other) in DIFFERENCES.items()
        }
        budget = "device_budget is None: give a size such as '900MiB', a percentage such as '50%', or bytes."
        own = found is second
        assert alone["not a budget"] == (f"ParameterError: {budget}" if own else f"RankError: Rank 1 failed: {budget}")
        assert alone["no optimizer"].startswith(f"{error}: Rank 1 has another optimizer than rank 0: none, not torch.")


def test_a_batch_that_differs_before_sharding(fit_stores: Path) -> None:
    first, second = on_ranks(2, _shards_of_another_batch, fit_stores)
    of_the_batch = "ParameterError: Rank 1 has another tensor in the batch than rank 0: "
    sharded = "The model is sharded already: call shard once, on the whole model."
    assert first.pop("sharded") == f"RankError: Rank 1 failed: {sharded}"
    assert second.pop("sharded") == f"ParameterError: {sharded}"
    assert first == second
    assert first["rows"].startswith(f"{of_the_batch}batch float32 (5, 4), not batch float32 (6, 4); give all")
    assert first["dtype"].startswith(f"{of_the_batch}batch float64 (6, 4), not batch float32 (6, 4); give all")
    assert first["names"].startswith(f"{of_the_batch}batch['input'] float32 (6, 4), not batch float32 (6, 4); give")
    assert "Rank 1 has another broadcast_buffers than rank 0: False, not True; give all" in first["buffers"]
    assert "Rank 1 has another mixed_precision than rank 0: " in first["precision"]
    assert "reduce_dtype=torch.float32" in first["precision"]


def test_only_the_first_rank_chooses_how_to_shard(fit_stores: Path) -> None:
    first, second = on_ranks(2, _choices_of_their_own, fit_stores)
    assert first == second
    assert first["kept"] == [True] * len(first["kept"])


def _choices_of_their_own(stores: Path) -> dict[str, Any]:
    """Rank 1 would let go of weights that rank 0 keeps."""
    keep = dist.get_rank() == 0
    model = _net()
    plan = _shard(model, stores, choices=lambda groups, *_: [GroupChoice(g.group, False, keep) for g in groups])
    torch.manual_seed(0)
    _square(model(torch.randn(6, 4)), None).backward()
    gradients = [float(p.grad.full_tensor().sum()) for p in model.parameters()]
    return {"kept": [c.keep for c in plan.choices], "plan": plan.content_hash, "gradients": gradients}


def test_later(fit_stores: Path) -> None:
    first, second = on_ranks(2, _later, fit_stores)
    nothing = "Nothing is planned yet: call the step, or `prepare`, first."
    assert first.pop("nothing to evaluate") == f"RankError: Rank 1 failed: {nothing}"
    assert second.pop("nothing to evaluate") == f"ParameterError: {nothing}"
    assert first == second
    assert "Rank 1 has another batch than rank 0: (5, 4), not (6, 4)" in first["batch"]
    assert re.fullmatch(
        r"RankError: Rank 1 has another plan than rank 0: none yet \(shape \(6, 4\) again, whose program had made room "
        r"for others\), not [0-9a-f]{16}; give all ranks the same\.",
        first["plan"],
    )
    assert first["dtype"] == (
        "RankError: Rank 1 has another tensor in the batch than rank 0: batch float64 (6, 4), not batch float32 (6, 4);"
        " give all ranks the same."
    )
    assert first["more"].startswith("RankError: Rank 1 has another tensor in the batch than rank 0: batch[0] float32")
    assert "Rank 1 has another place in the update than rank 0" in first["update"]
    assert first["evaluate"].startswith("RankError: Rank 1")
    assert first["fine"] == "nothing"
    assert first["losses"] == "[True, True]"


def _another_plan(stores: Path) -> dict[str, str]:
    """What is said where the plan that rank 1 gets is not the one that rank 0 has made."""

    def changed(planned: Planned, how: str) -> Planned:
        if how == "rows":
            return replace(planned, rows=[*planned.rows[:-2], planned.rows[-1], planned.rows[-2]])
        source = planned.source.replace("run.gather(", "run.gather( ", 1)
        assert source != planned.source
        return replace(planned, source=source, manifest=replace(planned.manifest, source_hash=source_hash(source)))

    real, broadcast = Ranks.from_first, Ranks.broadcast
    found = {}
    for how in ("rows", "source"):
        exchanged: list[str] = []

        def from_first(ranks: Ranks, make: Any, what: str = "", how: str = how) -> Any:
            got = real(ranks, make, what)
            if ranks.rank and what == "the plan of rank 0":
                (planned, size), *others = got
                return ((changed(planned, how), size), *others)
            return got

        def note(ranks: Ranks, tensor: torch.Tensor, what: str, said: list[str] = exchanged) -> None:
            said.append(what)
            broadcast(ranks, tensor, what)

        model, batch = _net(), torch.randn(6, 4)
        with mock.patch.object(Ranks, "from_first", from_first), mock.patch.object(Ranks, "broadcast", note):
            found[how] = _said(lambda model=model, batch=batch: _fit(model, stores)(batch))  # type: ignore[misc]
        found[f"{how}, exchanged"] = str(exchanged)
        found[f"{how}, whole"] = str(model[0].weight.sum().item() != 0)
    return found


def test_a_rank_with_another_plan_is_found_before_anything_is_exchanged(fit_stores: Path) -> None:
    first, second = on_ranks(2, _another_plan, fit_stores)
    assert first == second
    for how in ("rows", "source"):
        assert re.fullmatch(
            "RankError: Rank 1 has another plan than rank 0: [0-9a-f]{16}, not [0-9a-f]{16}; give all ranks the same.",
            first[how],
        ), first[how]
        assert first[f"{how}, exchanged"] == "[]"
        assert first[f"{how}, whole"] == "True"


def _another_shard_plan(stores: Path) -> tuple[str, bool]:
    real = ShardPlan.from_json

    def from_json(text: str) -> ShardPlan:
        plan = real(text)
        return replace(plan, prefetch=plan.prefetch + dist.get_rank())

    model = _net()
    with mock.patch.object(ShardPlan, "from_json", from_json):
        return _said(lambda: _shard(model, stores)), isinstance(model, FSDPModule)


def test_a_rank_with_another_plan_is_found_before_it_shards(fit_stores: Path) -> None:
    first, second = on_ranks(2, _another_shard_plan, fit_stores)
    assert first == second
    assert first[0].startswith("ParameterError: Rank 1 has another plan than rank 0: ")
    assert not first[1]


def _without_biases(model: nn.Module) -> nn.Module:
    """Leave a model its matrices alone, which is all that Muon updates."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.bias = None
    return model


def _optimizers(stores: Path) -> dict[str, str]:
    """What is said of optimizers, and of parameters that they do not hold."""
    found, batch = {}, torch.randn(6, 4)
    for name, make in {
        "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
        "Lamb": lambda model: Lamb(model.parameters()),
        "GlobalNorm": lambda model: GlobalNorm(model.parameters(), limit=1e-3),
        "Muon": lambda model: torch.optim.Muon(_without_biases(model).parameters()),
        "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
        "none": lambda model: None,
        "some": lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1),
    }.items():
        model = _net()
        found[name] = _said(
            lambda model=model, make=make: fit(  # type: ignore[misc]
                model, batch, make(model), device_budget="1GiB", loss=_square, quick=True, cache_dir=stores,
                group=dist.group.WORLD,
            )
        )  # fmt: skip
    hooked = _net()
    hooked[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    found["hook"] = _said(lambda: _fit(hooked, stores))
    return found


def test_what_cannot_update_shards_is_refused(fit_stores: Path) -> None:
    first, second = on_ranks(2, _optimizers, fit_stores)
    assert first == second
    for name in ("Adafactor", "Lamb", "GlobalNorm", "Muon"):
        assert first[name].startswith(f"ParameterError: The optimizer {name} cannot update shards: ")
        assert first[name].endswith("such as AdamW, SGD or Lion, or train without group.")
    assert "LBFGS" in first["LBFGS"]
    assert first["none"].startswith("ParameterError: Without an optimizer gradients stay in `.grad`")
    assert "Parameter '3.weight' gets a gradient, but the optimizer does not hold it" in first["some"]
    assert "Parameter '0.weight' has a hook of register_post_accumulate_grad_hook" in first["hook"]


@pytest.mark.parametrize("count", [3])
def test_the_rank_that_departs_from_most_is_named(count: int, fit_stores: Path) -> None:
    found = on_ranks(count, _first_departs, fit_stores)
    assert set(found) == {
        "RankError: Rank 0 has another method than rank 1: 'rockmate', not 'auto'; give all ranks the same."
    }


def _first_departs(stores: Path) -> str:
    return _said(lambda: _fit(_net(), stores, method="rockmate" if dist.get_rank() == 0 else "auto"))


def _alone(stores: Path) -> dict[str, Any]:
    """Train with a group of one process, and without a group; count what is exchanged meanwhile."""
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    exchanged = {name: mock.Mock(wraps=getattr(dist, name)) for name in EXCHANGES}
    with mock.patch.multiple(dist, **exchanged):
        for name, group in (("group", dist.group.WORLD), ("no group", None)):
            torch.manual_seed(0)
            model = _net()
            step = _fit(model, stores, group=group)
            losses = [step(batch).item() for _ in range(3)]
            actions = [(row.action, row.node, row.storage) for row in step.planned.rows]
            found[name] = losses, actions, [p.detach().clone() for p in model.parameters()]
    found["exchanged"] = [name for name, counted in exchanged.items() if counted.called]
    return found


EXCHANGES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_object",
    "broadcast_object_list",
    "all_gather_into_tensor",
)


def test_a_group_of_one_process_trains_as_without_a_group_and_exchanges_nothing(fit_stores: Path) -> None:
    (found,) = on_ranks(1, _alone, fit_stores)
    (losses, actions, parameters), (plain_losses, plain_actions, plain_parameters) = found["group"], found["no group"]
    assert losses == plain_losses
    assert actions == plain_actions
    assert not {action for action, _, _ in actions} & {"gather", "scatter"}
    assert all(map(torch.equal, parameters, plain_parameters))
    assert found["exchanged"] == []


def _changed_after_fit(stores: Path) -> list[str]:
    one = dist.get_rank() == 1
    model = _net()
    step = _fit(model, stores)
    batch = torch.randn(6, 4)
    step(batch)
    said = []
    if one:
        model.eval()
    said.append(_said(lambda: step(batch)))
    model.train()
    model[0].requires_grad_(not one)
    said.append(_said(lambda: step(batch)))
    model[0].requires_grad_(True)
    step(batch)
    return said


def test_what_one_rank_changes_after_fit_is_named(fit_stores: Path) -> None:
    first, second = on_ranks(2, _changed_after_fit, fit_stores)
    assert first == second
    mode, trained = first
    assert "none yet (the model has changed: the model is in evaluation mode;" in mode
    assert "none yet (the model has changed: 0.bias is" in trained

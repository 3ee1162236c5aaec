"""Ranks that are about to do different things all say so, in one sentence that names the rank, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import StowageError
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


def _fit(model: nn.Module, stores: Path, rows: int = 6, **more: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Mapping[str, Any] = {"device_budget": "1GiB", "loss": _square, "quick": True, "group": dist.group.WORLD}
    return fit(model, torch.randn(rows, 4), optimizer, cache_dir=stores, **{**settings, **more})


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
        "batch": _said(lambda: _fit(_net(), stores, rows=7 if one else 6)),
        "shape": _said(lambda: _fit(_net(9 if one else 8), stores)),
        "frozen": _said(lambda: _fit(frozen, stores)),
        "clipping": _said(lambda: _fit(_net(), stores, max_grad_norm=1.0 if one else None)),
        "number": _said(lambda: _fit(_net(factor=3.0 if one else 2.0), stores)),
        "torch": _said(lambda: _with_torch("2.0.1" if one else "2.0.0", lambda: _fit(_net(), stores))),
    }


def _with_torch(version: str, work: Say) -> None:
    with mock.patch.object(torch, "__version__", version):
        work()


def _later(stores: Path) -> dict[str, str]:
    """What a step says where ranks call it differently; the step goes on after each."""
    one = dist.get_rank() == 1
    step = _fit(_net(), stores, accumulate=2, new_shapes="quick", check="never")
    batch = torch.randn(6, 4)
    found = {
        "batch": _said(lambda: step(batch[:5] if one else batch, update=False)),
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
    assert first["torch"] == (
        "RankError: Rank 1 has another version of torch than rank 0: 2.0.1, not 2.0.0; give all ranks the same."
    )


def test_later(fit_stores: Path) -> None:
    first, second = on_ranks(2, _later, fit_stores)
    assert first == second
    assert "Rank 1 has another batch than rank 0: (5, 4), not (6, 4)" in first["batch"]
    assert "Rank 1 has another place in the update than rank 0" in first["update"]
    assert first["evaluate"].startswith("RankError: Rank 1")
    assert first["fine"] == "nothing"
    assert first["losses"] == "[True, True]"


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

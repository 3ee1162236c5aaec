"""One process alone: nothing is sharded where everything fits, and nothing is left behind where sharding fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stowage import ShardPlan, shard
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.runtime.fsdp import apply
from tests.sharding.beside_ddp import content, differences, state_of, varied
from tests.zoo import ZOO, Entry, loss_of

pytestmark = pytest.mark.usefixtures("_no_group")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, entry: Entry, steps: int) -> list[float]:
    losses = []
    for i in range(steps):
        torch.manual_seed(i)
        loss = loss_of(model, varied(entry[1], i), entry[2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_that_fits_stays_plain(fit_stores: Path) -> None:
    entry = ZOO["gpt2"]()
    model = entry[0]
    before = {name: (id(p), type(m)) for m in model.modules() for name, p in m.named_parameters(recurse=False)}
    optimizer = adamw(model)
    plan = shard(model, entry[1], optimizer, device_budget="1GiB", cache_dir=fit_stores)
    assert isinstance(plan, ShardPlan)
    assert plan.whole
    assert {name: (id(p), type(m)) for m in model.modules() for name, p in m.named_parameters(recurse=False)} == before
    assert not dist.is_initialized()
    assert "not sharded: one rank" in str(plan)


def test_shards_in_the_host_train_as_in_plain_pytorch(fit_stores: Path) -> None:
    entry, plain = ZOO["gpt2"](), ZOO["gpt2"]()
    optimizer, other = adamw(entry[0]), adamw(plain[0])
    assert train(entry[0], optimizer, entry, 2) == train(plain[0], other, plain, 2)  # states exist already
    plan = shard(
        entry[0],
        entry[1],
        optimizer,
        device_budget="1GiB",
        choices=state_of("host, reshard"),
        cache_dir=fit_stores,
    )
    assert not plan.whole
    assert all(isinstance(p, DTensor) for p in entry[0].parameters())
    assert train(entry[0], optimizer, entry, 3) == train(plain[0], other, plain, 3)
    assert not differences(content(entry[0], optimizer), content(plain[0], other))
    with pytest.raises(ParameterError, match="sharded already"):
        shard(entry[0], entry[1], optimizer, device_budget="1GiB", cache_dir=fit_stores)


@pytest.mark.parametrize("calls", [0, 2, 3])
def test_a_failure_leaves_model_and_optimizer_as_they_were(
    calls: int, fit_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, plain = ZOO["gpt2"](), ZOO["gpt2"]()
    model = entry[0]
    optimizer, other = adamw(model), adamw(plain[0])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    assert train(model, optimizer, entry, 2) == train(plain[0], other, plain, 2)
    kinds = [type(m) for m in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), vars(m).keys()) for m in model.modules()]
    parameters = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    real, count = apply.fully_shard, 0

    def failing(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise RuntimeError("no room")
        return real(*arguments, **keywords)

    monkeypatch.setattr(apply, "fully_shard", failing)
    with pytest.raises(RuntimeError, match="no room"):
        shard(
            model,
            entry[1],
            optimizer,
            device_budget="1GiB",
            choices=state_of("host, keep"),
            cache_dir=fit_stores,
        )
    assert [type(m) for m in model.modules()] == kinds
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks), vars(m).keys()) for m in model.modules()] == hooks
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == parameters
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {i for i, _ in parameters.values()}
    assert schedule.optimizer is optimizer
    assert not dist.is_initialized()
    assert train(model, optimizer, entry, 2) == train(plain[0], other, plain, 2)
    assert not differences(content(model, optimizer), content(plain[0], other))


def test_states_that_cannot_be_cut_are_refused(fit_stores: Path) -> None:
    entry = ZOO["gpt2"]()
    optimizer = torch.optim.Adafactor(entry[0].parameters())
    train(entry[0], optimizer, entry, 1)
    with pytest.raises(ParameterError, match=r"state 'row_var' of transformer\.w.* shard before"):
        shard(entry[0], entry[1], optimizer, device_budget="1GiB", cache_dir=fit_stores)


def test_optimizers_that_look_at_whole_tensors_are_refused(fit_stores: Path) -> None:
    entry = ZOO["gpt2"]()
    with pytest.raises(ParameterError, match=r"Adafactor cannot update shards .* 2 dimensions depends on all"):
        shard(
            entry[0],
            entry[1],
            torch.optim.Adafactor(entry[0].parameters()),
            device_budget="1GiB",
            cache_dir=fit_stores,
        )


def test_a_number_without_dimensions_is_refused(fit_stores: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> Any:
            return (x * self.scale).sum()

    with pytest.raises(ParameterError, match="Parameter scale is a single number"):
        shard(Scaled(), {"x": torch.ones(3)}, None, device_budget="1GiB", cache_dir=fit_stores)


def test_a_parameter_that_does_not_lie_in_order_is_refused_where_it_would_be_cut(fit_stores: Path) -> None:
    model, batch = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()), torch.ones(2, 3, 8, 8)
    model.to(memory_format=torch.channels_last)
    given: Any = {"device_budget": "1GiB", "loss": lambda outputs, _: outputs.sum(), "cache_dir": fit_stores}
    assert shard(model, batch, adamw(model), **given).whole
    with pytest.raises(ParameterError, match=r"Parameter 0.weight of shape \(5, 3, 3, 3\) lies in memory with strides"):
        shard(model, batch, adamw(model), choices=state_of("host, reshard"), **given)
    assert not dist.is_initialized()
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 2
    assert shard(model.to(memory_format=torch.contiguous_format), batch, adamw(model), **given).whole


@pytest.mark.parametrize("name", ["device_budget", "host_budget"])
@pytest.mark.parametrize("budget", ["50%", "+5%", "smallest"])
def test_budgets_are_sizes(name: str, budget: str, fit_stores: Path) -> None:
    entry = ZOO["gpt2"]()
    with pytest.raises(ParameterError, match=f"{name} is '.*', which is not a size"):
        shard(entry[0], entry[1], None, cache_dir=fit_stores, **{"device_budget": "1GiB", name: budget})


class Twice(nn.Module):
    """One module under two names, and one that is in a list twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = self.first
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer, nn.Linear(8, 8), layer])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.second(self.first(x).tanh())
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_module_under_two_names_is_the_models_own(fit_stores: Path) -> None:
    entry, plain = ((Twice(), {"x": torch.ones(4, 8)}, lambda loss, _: loss) for _ in range(2))
    optimizer, other = adamw(entry[0]), adamw(plain[0])
    plan = shard(
        entry[0],
        entry[1],
        optimizer,
        device_budget="1GiB",
        loss=entry[2],
        choices=state_of("device, reshard"),
        cache_dir=fit_stores,
    )
    assert [group.modules for group in plan.groups] == [("",), ("layers.1",)]
    assert train(entry[0], optimizer, entry, 3) == train(plain[0], other, plain, 3)
    assert not differences(content(entry[0], optimizer), content(plain[0], other))


def test_parameters_of_another_model_are_refused(fit_stores: Path) -> None:
    entry = ZOO["gpt2"]()
    optimizer = torch.optim.SGD([*entry[0].parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ParameterError, match="the model does not have"):
        shard(entry[0], entry[1], optimizer, device_budget="1GiB", cache_dir=fit_stores)


def test_a_plan_is_the_same_after_it_has_been_text(fit_stores: Path) -> None:
    entry = ZOO["t5"]()
    plan = shard(entry[0], entry[1], adamw(entry[0]), device_budget="1GiB", cache_dir=fit_stores)
    again = ShardPlan.from_json(plan.to_json())
    assert again == plan
    assert again.content_hash == plan.content_hash
    assert all(isinstance(c, GroupChoice) for c in again.choices)


class Own:
    """A batch of a class of one's own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y
        self.source = "made here"


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Regression(nn.Module):
    """Takes the whole batch, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, batch: Own | Pair) -> torch.Tensor:
        return (self.layers(batch.x) - batch.y).square().mean()


@pytest.mark.parametrize("kind", [Own, Pair])
def test_forward_takes_batches_that_the_model_is_not_called_with(kind: type[Own | Pair], fit_stores: Path) -> None:
    torch.manual_seed(0)
    batch = kind(torch.randn(4, 16), torch.randn(4, 16))
    model, plain = Regression(), Regression()
    plain.load_state_dict(model.state_dict())
    optimizers = {m: adamw(m) for m in (model, plain)}
    plan = shard(
        model,
        batch,
        optimizers[model],
        forward=lambda module, given: module(given),
        device_budget="1GiB",
        choices=state_of("host, reshard"),
        cache_dir=fit_stores,
    )
    assert not plan.whole
    losses: dict[nn.Module, list[float]] = {model: [], plain: []}
    for _ in range(3):
        for m, optimizer in optimizers.items():
            optimizer.zero_grad()
            loss = m(batch)
            loss.backward()
            optimizer.step()
            losses[m].append(loss.item())
    assert losses[model] == losses[plain]


def test_loss_and_forward_are_not_given_together(fit_stores: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ParameterError, match="Pass loss, which takes the model's outputs, or forward"):
        shard(
            model,
            torch.ones(1, 4),
            loss=lambda outputs, _: outputs.sum(),
            forward=lambda module, batch: module(batch).sum(),
            device_budget="1GiB",
            cache_dir=fit_stores,
        )


def test_an_optimizer_with_a_counter_among_its_states(fit_stores: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["steps"] = self.state.get("steps", 0) + 1
            return super().step(closure)

    entry, plain = ZOO["gpt2"](), ZOO["gpt2"]()
    optimizer, other = (Counting(e[0].parameters(), lr=1e-2) for e in (entry, plain))
    assert train(entry[0], optimizer, entry, 1) == train(plain[0], other, plain, 1)
    plan = shard(
        entry[0], entry[1], optimizer, device_budget="1GiB", choices=state_of("host, reshard"), cache_dir=fit_stores
    )
    assert not plan.whole
    assert train(entry[0], optimizer, entry, 2) == train(plain[0], other, plain, 2)
    assert optimizer.state["steps"] == 3

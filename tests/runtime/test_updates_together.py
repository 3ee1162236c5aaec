"""Several updates in one call of the optimizer give the numbers of plain PyTorch, hooks and failures included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.runtime import PerParameterUpdates, Program
from stowage.stages.runtime.bind import bind
from stowage.stages.solve.summary import Solved
from stowage.stages.trace import MicroBatch
from tests.matrix import some
from tests.runtime.beside_eager import MakeOptimizer, assert_equal_training, differences, prepare, same
from tests.runtime.test_per_parameter_updates import groups_of
from tests.solve.prepared import PLENTY, Prepared
from tests.zoo import ZOO, loss_of

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "groups": lambda m: torch.optim.AdamW(groups_of(m), lr=1e-2),
    "groups fused": lambda m: torch.optim.AdamW(groups_of(m), lr=1e-2, fused=True),
    "groups, foreach": lambda m: torch.optim.SGD(groups_of(m), lr=1e-2, momentum=0.5, foreach=True),
}


def on_a_card(prepared: Prepared) -> Prepared:
    """For solving."""
    return replace(prepared, trace=replace(prepared.trace, meta=replace(prepared.trace.meta, device="cuda")))


@cache
def prepared_for(name: str, optimizer: str, micro_batch: MicroBatch | None = None) -> Prepared:
    return prepare(ZOO[name], OPTIMIZERS[optimizer], micro_batch)


def solved_for(prepared: Prepared, part: float) -> Solved:
    """Budgets from the smallest feasible (0) to plenty (1)."""
    card = on_a_card(prepared)
    most = card.solve()
    if part >= 1:
        return most
    low, high = most.summary.smallest_feasible_bytes, most.summary.keep_all_peak_bytes
    return card.solve(int(low + part * (high - low)))


def calls_in(prepared: Prepared, solved: Solved) -> int:
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
    return source.count("run.update_together(")


@pytest.mark.parametrize("part", [0.3, 1.0])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    some(
        product(("gpt2", "tied", "resnet", "lstm", "gpt2_frozen", "transformer", "batchnorm"), OPTIMIZERS),
        keep=[
            ("tied", "AdamW"), ("tied", "groups"), ("resnet", "AdamW fused"), ("lstm", "momentum"),
            ("batchnorm", "AdamW foreach"), ("resnet", "groups fused"), ("tied", "groups, foreach"),
        ],
    ),
)  # fmt: skip
def test_equal_to_eager(name: str, optimizer: str, part: float) -> None:
    prepared = prepared_for(name, optimizer)
    solved = solved_for(prepared, part)
    assert calls_in(prepared, solved) >= 1
    assert_equal_training(ZOO[name], prepared, solved, optimizer=OPTIMIZERS[optimizer], iterations=3)


class Run:
    """Programs of an update's micro-batches and plain PyTorch, beside each other."""

    def __init__(
        self,
        name: str,
        optimizer: str,
        micro_batches: list[MicroBatch] | None = None,
        part: float = 1.0,
        change: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    ) -> None:
        self.micro_batches = micro_batches or [MicroBatch()]
        (self.eager, self.batch, self.loss), (self.model, _, _) = ZOO[name](), ZOO[name]()
        self.eager_optimizer, self.optimizer = OPTIMIZERS[optimizer](self.eager), OPTIMIZERS[optimizer](self.model)
        change(self.eager, self.eager_optimizer)
        change(self.model, self.optimizer)
        self.programs: list[Program] = []
        self.sources: list[str] = []
        for micro_batch in self.micro_batches:
            prepared = prepared_for(name, optimizer, micro_batch)
            solved = solved_for(prepared, part)
            source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
            known = manifest_of(source, "", "").source_hash
            file = f"step_{known[:8]}.py"
            self.programs.append(bind(source, known, file, prepared.trace, self.model, self.optimizer))
            self.sources.append(source)

    def eager_step(self, micro_batch: MicroBatch) -> torch.Tensor:
        value = loss_of(self.eager, self.batch, self.loss)
        torch.autograd.backward(value)
        if micro_batch.update:
            if micro_batch.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.eager.parameters(), micro_batch.max_grad_norm)
            self.eager_optimizer.step()
            self.eager_optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def train(self, rounds: int = 3) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            for number in range(rounds):
                for micro_batch, program in zip(self.micro_batches, self.programs, strict=True):
                    state = torch.get_rng_state()
                    expected = self.eager_step(micro_batch)
                    torch.set_rng_state(state)
                    assert same(program(self.batch).detach(), expected), f"loss of round {number}"
                    assert differences(self.model, self.eager) == [], f"round {number}"
                    assert same(self.optimizer.state_dict(), self.eager_optimizer.state_dict()), f"round {number}"


@pytest.mark.parametrize("max_grad_norm", [0.1, float("inf")])
@pytest.mark.parametrize(("name", "optimizer"), [("tied", "groups"), ("lstm", "AdamW fused")])
def test_clipping(name: str, optimizer: str, max_grad_norm: float) -> None:
    run = Run(name, optimizer, [MicroBatch(max_grad_norm=max_grad_norm)])
    assert "run.update_together(" in run.sources[0]
    run.train()


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("name", ["tied", "resnet", "lstm"])
def test_gradients_that_wait(name: str, max_grad_norm: float | None) -> None:
    model, _, _ = ZOO[name]()
    waiting = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    last = MicroBatch(waiting=waiting, max_grad_norm=max_grad_norm)
    batches = [MicroBatch(update=False), MicroBatch(waiting=waiting, update=False), last]
    run = Run(name, "AdamW", batches)
    assert ["run.update_together(" in source for source in run.sources] == [False, False, True]
    run.train(2)


def test_hooks_run_in_their_order_and_see_the_gradient() -> None:
    seen: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mine = seen.setdefault(len(seen), [])
        for name, parameter in model.named_parameters():

            def first(p: Any, name: str = name) -> None:
                mine.append((f"{name}, first", p.grad.clone()))
                p.grad.mul_(0.5)

            def second(p: Any, name: str = name) -> None:
                mine.append((f"{name}, second", p.grad.clone()))

            parameter.register_post_accumulate_grad_hook(first)
            parameter.register_post_accumulate_grad_hook(second)

    run = Run("resnet", "AdamW", change=change)
    run.train(2)
    eager, planned = (dict(found) for found in seen.values())
    assert len(planned) == 2 * len(list(run.model.parameters()))
    assert same(planned, eager)
    names = [name for name, _ in seen[1]]
    pairs = list(zip(names[::2], names[1::2], strict=True))
    assert all(one.replace("first", "second") == two for one, two in pairs), "the second right after the first"


def test_a_hook_that_uses_the_gradient_up() -> None:
    """Its parameter is updated by the hook, and not by the optimizer."""

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def hook(p: Any) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.01)
            p.grad = None

        [*model.parameters()][2].register_post_accumulate_grad_hook(hook)

    run = Run("resnet", "momentum", change=change)
    run.train()
    assert len(run.optimizer.state) == len(list(run.model.parameters())) - 1


def test_all_gradients_used_up() -> None:
    """The optimizer has nothing to do, and is not called."""
    called: list[int] = []

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def hook(p: Any) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.01)
            p.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    run = Run("tied", "momentum", change=change)
    run.optimizer.register_step_pre_hook(lambda *_: called.append(1))
    run.train(2)
    assert called == []


def test_hooks_of_the_optimizer_run_once_a_call() -> None:
    before: list[int] = []
    after: list[bool] = []
    run = Run("tied", "AdamW")
    run.optimizer.register_step_pre_hook(
        lambda optimizer, *_: before.append(sum(len(group["params"]) for group in optimizer.param_groups))
    )
    run.optimizer.register_step_post_hook(lambda *_: after.append(torch.is_grad_enabled()))
    run.train(2)
    assert run.sources[0].count("run.update_together(") == 1
    assert before == [len(list(run.model.parameters()))] * 2
    assert after == [True, True]


class Unwilling(torch.optim.SGD):
    """Raises after the first parameter has moved."""

    def step(self, closure: Any = None) -> Any:
        first = next(p for group in self.param_groups for p in group["params"])
        with torch.no_grad():
            first.add_(1)
        raise RuntimeError("no more")


def whole(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def test_an_optimizer_that_raises_leaves_groups_whole_and_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = Unwilling([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], lr=1.0)
    updates = PerParameterUpdates(optimizer, dict(model.named_parameters()))
    before = whole(optimizer)
    with pytest.raises(RuntimeError, match="no more"):
        updates.some({name: torch.ones_like(p) for name, p in model.named_parameters() if name != "1.bias"})
    assert whole(optimizer) == before
    assert all(p.grad is None for p in model.parameters())


def test_a_hook_that_raises_leaves_no_gradient() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before, weight = whole(optimizer), model.weight.detach().clone()

    def hook(parameter: Any) -> None:
        raise RuntimeError("not this one")

    model.bias.register_post_accumulate_grad_hook(hook)
    updates = PerParameterUpdates(optimizer, dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match="not this one"):
        updates.some({name: torch.ones_like(p) for name, p in model.named_parameters()})
    assert whole(optimizer) == before
    assert model.weight.grad is None
    assert model.bias.grad is None
    assert torch.equal(model.weight, weight), "nothing is updated where a hook refuses"


def test_one_that_the_optimizer_does_not_hold() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    updates = PerParameterUpdates(optimizer, dict(model.named_parameters()))
    with pytest.raises(PlanMismatchError, match="The plan updates 'bias', which the optimizer does not hold"):
        updates.some({name: torch.ones_like(p) for name, p in model.named_parameters()})
    assert all(p.grad is None for p in model.parameters())


def test_others_keep_what_waits_for_them() -> None:
    """An update of some parameters touches no gradient and no state of the others."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    updates = PerParameterUpdates(optimizer, dict(model.named_parameters()))
    waiting = torch.ones_like(model[1].weight)
    model[1].weight.grad = waiting
    before = model[1].weight.detach().clone()
    updates.some({"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3)})
    assert model[1].weight.grad is waiting
    assert torch.equal(model[1].weight, before)
    assert set(optimizer.state) == {model[0].weight, model[0].bias}


def test_parameters_that_are_frozen_midway() -> None:
    """Another program goes on with the same optimizer, whose states of what is frozen stay."""

    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" not in name)
        return model

    def frozen() -> Any:
        model, batch, loss = ZOO["resnet"]()
        return freeze(model), batch, loss

    run = Run("resnet", "AdamW")
    run.train(2)
    prepared = prepare(frozen, OPTIMIZERS["AdamW"])
    solved = solved_for(prepared, 1.0)
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
    assert "run.update_together(" in source
    freeze(run.model)
    freeze(run.eager)
    known = manifest_of(source, "", "").source_hash
    later = bind(source, known, "step_frozen.py", prepared.trace, run.model, run.optimizer)
    first, run.programs = run.programs, [later]
    run.train(2)
    for model in (run.model, run.eager):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    run.programs = first
    run.train(1)


def test_plans_of_a_cpu_have_no_such_call() -> None:
    for name in ("tied", "lstm", "resnet"):
        prepared = prepared_for(name, "AdamW")
        for solved in (prepared.solve(PLENTY), prepared.smallest()):
            assert calls_in(prepared, solved) == 0

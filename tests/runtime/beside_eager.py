"""Train a model under a plan and beside it in plain PyTorch, and compare everything bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.solve.summary import Solved
from stowage.stages.trace import MicroBatch, trace_step
from tests.solve.prepared import Prepared, prepare_trace
from tests.zoo import Entry, loss_of

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What most tests train with."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def prepare(
    build: Callable[[], Entry], optimizer: MakeOptimizer | None = adamw, micro_batch: MicroBatch | None = None
) -> Prepared:
    """Trace a model that is thrown away afterwards."""
    model, batch, loss = build()
    made = optimizer(model) if optimizer else None
    return prepare_trace(trace_step(model, batch, loss=loss, optimizer=made, micro_batch=micro_batch))


def program_of(
    prepared: Prepared, solved: Solved, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Program:
    """Generate the step and bind it."""
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
    manifest = manifest_of(source, solved.summary.plan_hash, solved.summary.configuration_hash)
    return bind(source, manifest.source_hash, f"step_{manifest.source_hash[:8]}.py", prepared.trace, model, optimizer)


def eager_step(model: nn.Module, batch: Any, loss: Any, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
    """One iteration of plain PyTorch."""
    value = loss_of(model, batch, loss)
    torch.autograd.backward(value)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return value.detach()


def same(one: Any, two: Any) -> bool:
    """Equal bit for bit, containers included; dictionaries in any order."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        form = one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride()
        return form and torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def differences(model: nn.Module, other: nn.Module) -> list[str]:
    """Names of parameters, buffers and gradients that are not equal."""
    found = []
    for (name, one), (_, two) in zip(
        [*model.named_parameters(), *model.named_buffers()], [*other.named_parameters(), *other.named_buffers()]
    ):
        if not same(one.detach(), two.detach()):
            found.append(name)
        if not same(one.grad, two.grad):
            found.append(f"{name}.grad")
    return found


def assert_equal_training(
    build: Callable[[], Entry],
    prepared: Prepared,
    solved: Solved,
    *,
    optimizer: MakeOptimizer | None = adamw,
    iterations: int = 3,
    batches: Iterable[Any] | None = None,
    still: Iterable[str] = (),
) -> None:
    """Losses, parameters, buffers, gradients, optimizer states and the random state agree after every iteration, and an
    optimizer has moved every parameter that trains but `still`, whose gradient is nothing."""
    (eager, batch, loss), (model, _, _) = build(), build()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    eager_optimizer = optimizer(eager) if optimizer else None
    planned_optimizer = optimizer(model) if optimizer else None
    program = program_of(prepared, solved, model, planned_optimizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        for iteration, given in enumerate(batches if batches is not None else [batch] * iterations):
            torch.set_rng_state(state)
            expected = eager_step(eager, given, loss, eager_optimizer)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            found = program(given)
            assert torch.equal(torch.get_rng_state(), after), f"random state after iteration {iteration}"
            assert same(found.detach(), expected), f"loss of iteration {iteration}: {found} and {expected}"
            assert differences(model, eager) == [], f"iteration {iteration}"
            if eager_optimizer is not None and planned_optimizer is not None:
                assert same(planned_optimizer.state_dict(), eager_optimizer.state_dict()), f"states of {iteration}"
            state = after
    if optimizer is not None:
        unmoved = [name for name, p in model.named_parameters() if name in before and same(p.detach(), before[name])]
        assert unmoved == list(still)

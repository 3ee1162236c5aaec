"""Train with masks that change under a plan, and beside it in plain PyTorch with `requires_grad` set by them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.units import Unit
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.solve.summary import Solved
from tests.runtime.beside_eager import MakeOptimizer, differences, same
from tests.solve.prepared import Prepared
from tests.zoo import Entry, loss_of


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Decays weights and keeps two states and a counter for each parameter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Goes on moving what it has moved before, unless it is left out."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def masks(units: Sequence[Unit], count: int, seed: int = 0) -> Iterator[list[str]]:
    """Masks that differ each time: one unit, some units, all, none at all."""
    names, draws = [unit.name for unit in units], random.Random(seed)
    for number in range(count):
        many = (1, 2, len(names) // 2, 1, len(names), 3, 0)[number % 7]
        yield draws.sample(names, min(many, len(names)))


def plain_step(
    model: nn.Module,
    batch: Any,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    active: list[str],
) -> torch.Tensor:
    """One iteration of plain PyTorch in which only some units require gradients."""
    parameters = dict(model.named_parameters())
    frozen = [parameters[name] for unit in units if unit.name not in active for name in unit.parameters]
    for parameter in frozen:
        parameter.requires_grad_(False)
    value = loss_of(model, batch, loss)
    if value.requires_grad:
        torch.autograd.backward(value)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return value.detach()


def frozen_program(
    prepared: Prepared, solved: Solved, units: Sequence[Unit], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Program:
    """Generate the step with its conditions, and bind it."""
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots, units)
    manifest = manifest_of(source, solved.summary.plan_hash, solved.summary.configuration_hash)
    name = f"frozen_step_{manifest.source_hash[:8]}.py"
    names = [unit.name for unit in units]
    return bind(source, manifest.source_hash, name, prepared.trace, model, optimizer, units=names)


def assert_frozen_training(
    build: Callable[[], Entry],
    prepared: Prepared,
    solved: Solved,
    units: Sequence[Unit],
    optimizer: MakeOptimizer = adamw,
    iterations: int = 10,
) -> None:
    """Losses, parameters, buffers, gradients, states and the random state agree after every iteration."""
    (plain, batch, loss), (model, _, _) = build(), build()
    plain_optimizer, own_optimizer = optimizer(plain), optimizer(model)
    program = frozen_program(prepared, solved, units, model, own_optimizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        for number, active in enumerate(masks(units, iterations)):
            torch.set_rng_state(state)
            expected = plain_step(plain, batch, loss, plain_optimizer, units, active)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            program.active.choose(active)
            found = program(batch)
            assert torch.equal(torch.get_rng_state(), after), f"random state after iteration {number}"
            assert same(found.detach(), expected), f"loss of iteration {number} ({active}): {found} and {expected}"
            assert differences(model, plain) == [], f"iteration {number} ({active})"
            assert same(own_optimizer.state_dict(), plain_optimizer.state_dict()), f"states of {number}"
            state = after

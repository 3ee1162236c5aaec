"""Clipping and accumulation where parameters, gradients and states together do not fit: gradients are offloaded too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.flows.planning.planned import Planned
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.machine import DISK_STAGING_BYTES
from stowage.stages.ir.updates import is_gradient_slot
from tests.configurations.alongside import Plain, assert_measured, batches, small_gpt2
from tests.matrix import some
from tests.runtime.beside_eager import differences, same


def model() -> nn.Module:
    """Weights outweigh activations."""
    return small_gpt2(n_embd=256, n_positions=64)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def budget() -> int:
    """Less than parameters, gradients and states take, staging aside."""
    state = 4 * sum(p.nbytes for p in model().parameters())
    return DISK_STAGING_BYTES + int(0.35 * state)


def fitted(given: list[Any], stores: Path, folder: Path, **how: Any) -> TrainingStep:
    return fit(
        model(), given[0], adamw, device_budget=budget(), offload_dir=folder, cache_dir=stores, quick=True, **how
    )


def assert_alike(step: TrainingStep, plain: Plain, given: list[Any], updates: list[bool]) -> None:
    """Losses and norms of every micro-batch, gradients that wait, and at the end everything."""
    before = {n: p.detach().clone() for n, p in plain.model.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        state = torch.get_rng_state()
        for number, (batch, update) in enumerate(zip(given, updates, strict=True)):
            torch.set_rng_state(state)
            expected = plain(batch, update=update)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            assert same(step(batch, update=update), expected), f"loss of micro-batch {number}"
            assert torch.equal(torch.get_rng_state(), after), f"random state after micro-batch {number}"
            if update and plain.max_grad_norm is not None:
                assert same(step.grad_norm, plain.norm), f"norm of micro-batch {number}"
            state = after
    assert step.optimizer is not None
    with step.on_device():
        assert differences(step.model, plain.model) == []
        assert same(step.optimizer.state_dict(), plain.optimizer.state_dict())
        for (name, mine), theirs in zip(step.model.named_parameters(), plain.model.parameters(), strict=True):
            assert not torch.equal(mine, before[name]), f"{name} moves"
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or same(mine.grad, theirs.grad), f"gradient of {name}"


def beside(max_grad_norm: float | None) -> Plain:
    eager = model()
    return Plain(eager, adamw(eager.parameters()), max_grad_norm=max_grad_norm)


def test_clipped_gradients_leave_and_come_back(fit_stores: Path, tmp_path: Path) -> None:
    given = batches(model(), 6)
    step = fitted(given, fit_stores, tmp_path, max_grad_norm=0.5)
    plan, planned = step.plan, step.planned
    gradients = {planned.trace.values[g.gradient_value].storage for g in planned.trace.gradients}
    moved = {r.storage for r in planned.rows if r.action == "reload"}
    assert gradients & moved, "some gradients do not stay for the norm of all"
    assert plan.device_peak_bytes <= budget()
    assert_alike(step, beside(0.5), given[:5], [True] * 5)
    assert_measured(step, given[5])


@pytest.mark.parametrize("max_grad_norm", some([None, 0.5, float("inf")], keep=[0.5]))
def test_offloaded_gradients_wait_for_the_next_micro_batch(
    max_grad_norm: float | None, fit_stores: Path, tmp_path: Path
) -> None:
    given = batches(model(), 15)
    step = fitted(given, fit_stores, tmp_path, max_grad_norm=max_grad_norm, accumulate=3)
    plans = [known.planned for known in step.programs.known]
    assert len(plans) == 3
    assert any(is_gradient_slot(s.name) for planned in plans for s in planned.slots)
    updates = [i % 3 == 2 for i in range(14)]  # ends in the middle of an update: gradients wait
    assert_alike(step, beside(max_grad_norm), given[:14], updates)
    assert_measured(step, given[14])
    for i in range(3):
        assert_measured(step, given[i], update=i == 2)


def away(planned: Planned) -> set[str]:
    """Return what a plan keeps off the device between iterations, or on its way from there or back."""
    return {s.name for s in planned.slots if s.role != "temporary" and s.start != "device"}


def test_between_iterations_as_little_as_planned(fit_stores: Path, tmp_path: Path) -> None:
    """What waits takes the room that the plans say, and only what two plans have elsewhere is copied between them."""
    given = batches(model(), 3)
    step = fitted(given, fit_stores, tmp_path, accumulate=3)
    for i, batch in enumerate(given):
        step(batch, update=i == 2)
    before = away(step.planned)
    program = step.prepare(given[0], update=False)
    after = away(next(known.planned for known in step.programs.known if known.program is program))
    assert step.programs.offloading is not None
    offloading = step.programs.offloading
    offloaded_names = set(offloading.offloaded().values())
    program.enter()
    assert offloaded_names ^ set(offloading.offloaded().values()) <= before ^ after
    offloaded_names = set(offloading.offloaded().values())
    program.enter()
    assert set(offloading.offloaded().values()) == offloaded_names, "all is where it should be"
    step(given[0], update=False)
    waiting = sum(p.grad.untyped_storage().nbytes() for p in step.model.parameters() if p.grad is not None)
    assert waiting < sum(p.nbytes for p in model().parameters()) - MIB


def test_dropped_gradients_are_forgotten(fit_stores: Path, tmp_path: Path) -> None:
    """`zero_grad` in the middle of an update: the next micro-batch is a first one, as in plain PyTorch."""
    given = batches(model(), 4)
    step, plain = fitted(given, fit_stores, tmp_path, accumulate=2), beside(None)
    with torch.random.fork_rng(devices=[]):
        for updates in ([False], [False, True], [False]):
            for each in (step, plain):
                torch.manual_seed(3)
                assert each.optimizer is not None
                each.optimizer.zero_grad()
                for batch, update in zip(given, updates):
                    each(batch, update=update)
    assert_alike(step, plain, given[1:2], [True])


def test_evaluation_leaves_them_where_they_are(fit_stores: Path, tmp_path: Path) -> None:
    given = batches(model(), 3)
    step, plain = fitted(given, fit_stores, tmp_path, accumulate=2), beside(None)
    for each in (step, plain):
        torch.manual_seed(3)
        each(given[0], update=False)
    assert step.programs.offloading is not None
    offloaded_names = set(step.programs.offloading.offloaded().values())
    assert any(is_gradient_slot(name) for name in offloaded_names)
    with torch.no_grad():
        expected = plain.model.eval()(**given[1]).logits
        plain.model.train()
    assert same(step.evaluate(given[1]).logits, expected)
    assert set(step.programs.offloading.offloaded().values()) == offloaded_names
    assert_alike(step, plain, given[2:], [True])

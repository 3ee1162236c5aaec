"""Steps that freeze, and values kept in codes: kernels, and the numbers that leave a device, are a device's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from stowage.flows.planning.by_rules import RulePlan, Rules
from stowage.stages.device import device_of
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.lossy import KINDS
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.rewrite import REWRITES
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.runtime.moves import Moves
from stowage.stages.sensitivity import StepTensors, run_trace
from stowage.stages.trace import record_step, with_updates
from tests.gpu.cases import Case
from tests.gpu.side_by_side import SEED, Planned, Trained, a_tier, came_to, differences
from tests.rewrite.packed_by_hooks import Chosen, hooked

STEPS = 6
MODELS = ("gpt2", "llama", "convolutions")


@cache
def freezing(case: Case, micro_batch: int = 0) -> Rules:
    """The iteration of a case, of which every unit may be frozen."""
    del micro_batch
    model, batches = case.build()
    recorded = record_step(model, batches[0], objective=case.loss, freezes=True)
    trace = with_updates(recorded, model, optimizer=case.optimizer(model.parameters()))
    return Rules(trace, units=units_of(trace, "saving"))


def masks(units: list[Unit]) -> list[list[Unit]]:
    """Everything, nothing, and a few units, as drawn."""
    draws = random.Random(0)
    return [units, [], *(draws.sample(units, max(1, len(units) // 4)) for _ in range(STEPS - 2))]


def plainly(case: Case, units: list[Unit]) -> Trained:
    """By plain PyTorch, in which what is frozen requires no gradient."""
    model, (batch,) = case.build()
    optimizer, losses = case.optimizer(model.parameters()), list[float]()
    torch.manual_seed(SEED)
    for mask in masks(units):
        trained = {name for unit in mask for name in unit.parameters}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        loss = case.loss(model, batch)
        if mask:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return came_to(case, losses, model, optimizer)


SCHEDULES: list[Callable[[Rules], RulePlan]] = [Rules.keep_all, Rules.recompute_all, Rules.stream_all]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["keep", "again", "stream"])
def test_frozen_units(model: str, schedule: Any, device: str) -> None:
    case = Case(model, device)
    units = freezing(case).units
    tier = a_tier(device) if schedule is Rules.stream_all else None
    training = Planned(case, schedule, tier, of=freezing)
    torch.manual_seed(SEED)
    losses: list[float] = []
    for mask in masks(units):
        (program,) = training.programs
        program.active.choose([unit.name for unit in mask])
        losses += training.step()
    found = training.trained(losses)
    if tier is not None:
        tier.close()
    assert differences(found, plainly(case, units)) == []


@pytest.mark.parametrize("relative", [False, True])
def test_how_far_units_move(relative: bool, device: str) -> None:
    """The numbers leave the device while an update ends, and nothing of them stays there."""
    moves = Moves([Unit("a", ("weight",))], relative)
    old, new = torch.full((300,), 2.0, device=device), torch.full((300,), 3.0, device=device)
    copies = [old.clone() for _ in range(2)]
    moves.measured("weight", copies.pop(), new)
    assert moves.take() == {"a": 0.5}
    measured = device_of(device).measure(lambda: moves.measured("weight", copies[0], new))
    assert measured.end_bytes == 0
    assert moves.take() == {"a": 0.5}


@pytest.mark.parametrize("model", MODELS)
def test_codes(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients equal those of plain PyTorch whose hooks keep the same values in the same codes."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    case = Case(model, device)
    module, (batch,) = case.build()
    recorded = record_step(module, batch, objective=case.loss)
    trace = with_updates(recorded, module, optimizer=case.optimizer(module.parameters()))
    tried = [kind for kind in KINDS if REWRITES[kind].everywhere(trace) is not trace]
    assert len(tried) > 3
    for kind in tried:
        _equals_hooks(case, trace, kind)


def _equals_hooks(case: Case, trace: TraceTables, kind: str) -> None:
    module, (batch,) = case.build()
    packed = REWRITES[kind].everywhere(trace)
    torch.manual_seed(SEED)
    loss, gradients = run_trace(packed, StepTensors.of(module, batch))
    torch.manual_seed(SEED)
    with hooked(Chosen.of(trace, kind)) as mode:
        expected = case.loss(module, batch)
        expected.backward()
    assert mode.used
    assert torch.equal(expected, loss)
    own = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert [n for n, gradient in own.items() if not torch.equal(gradient, gradients[n])] == [], kind

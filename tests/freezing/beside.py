"""Train through `fit` with masks that a test gives, and beside it in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stowage.flows import Freeze, TrainingStep
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.units import Unit
from tests.freezing.frozen import masks
from tests.runtime.beside_eager import differences, same

LossOf = Callable[[nn.Module, Any], torch.Tensor]


class Given:
    """A policy of a user: masks one after the other, then the last again; at most `most` units at once."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.masks: list[list[str]] = []

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        if not self.masks:
            return list(dynamics)[: self.most_active(len(dynamics))]
        return self.masks[min(step, len(self.masks) - 1)]

    def most_active(self, units: int) -> int:
        return units if self.most is None else self.most


def units_in(step: TrainingStep) -> tuple[Unit, ...]:
    """The units of a step that has been planned."""
    assert step.frozen is not None
    assert step.frozen.freezing.found is not None
    return step.frozen.freezing.found.units


def assert_equal_to_plain(
    step: TrainingStep,
    policy: Given,
    plain: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossOf,
    given: Sequence[Any],
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    updates: int = 10,
) -> None:
    """Losses, gradients that wait, parameters, buffers, states, norms and the random state, after every micro-batch.

    Masks differ from update to update; in plain PyTorch they set `requires_grad`.
    """
    units = units_in(step)
    most = policy.most_active(len(units))
    policy.masks = [chosen[:most] for chosen in masks(units, updates)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        state = torch.get_rng_state()
        for update in range(updates):
            trains = {n: n for u in units if u.name in policy.masks[update] for n in u.parameters}
            frozen = [p for n, p in plain.named_parameters() if p.requires_grad and n not in trains and _in(n, units)]
            for parameter in frozen:
                parameter.requires_grad_(False)
            for micro in range(accumulate):
                batch, last = given[(update * accumulate + micro) % len(given)], micro == accumulate - 1
                torch.set_rng_state(state)
                expected, norm = loss_of(plain, batch), None
                if expected.requires_grad:
                    torch.autograd.backward(expected)
                if last:
                    if max_grad_norm is not None:
                        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                after = torch.get_rng_state()
                torch.set_rng_state(state)
                found = step(batch, update=last)
                where = f"update {update}, micro-batch {micro} ({policy.masks[update]})"
                assert same(found.detach(), expected.detach()), f"loss of {where}: {found} and {expected}"
                assert torch.equal(torch.get_rng_state(), after), where
                with step.on_device():
                    assert differences(step.model, plain) == [], where
                    assert step.optimizer is not None
                    assert same(step.optimizer.state_dict(), optimizer.state_dict()), where
                if norm is not None:
                    assert same(step.grad_norm, norm), where
                state = after
            for parameter in frozen:
                parameter.requires_grad_(True)


def _in(name: str, units: Sequence[Unit]) -> bool:
    return any(name in unit.parameters for unit in units)


def assert_worst_measured(step: TrainingStep, policy: Given, batch: Any, *, near: bool = True) -> None:
    """Every unit has its states; then the mask that the solver found takes what the plan says, within the budget."""
    units, most = [unit.name for unit in units_in(step)], policy.most
    assert most is not None
    assert step.frozen is not None
    assert step.frozen.schedule is not None
    done = step.frozen.schedule.step
    turns = [units[i : i + most] for i in range(0, len(units), most)]
    worst = list(step.plan.worst_units)
    policy.masks = [[]] * done + turns + [worst]
    for _ in turns:
        step(batch)
    peak, plan = step.measure(batch).peak_bytes, step.plan
    assert peak <= plan.device_budget_bytes
    assert peak <= plan.device_peak_bytes
    if near:
        assert abs(peak - plan.device_peak_bytes) <= max(0.02 * plan.device_peak_bytes, MIB / 64)


def freeze(policy: Given, **more: Any) -> Freeze:
    """What a test freezes: all but what its policy gives."""
    return Freeze(policy=policy, **more)

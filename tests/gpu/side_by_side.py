"""The same training by plain PyTorch and under plans made by hand, and what differs afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows.planning.by_rules import RulePlan, Rules
from stowage.stages.device.tiers import NullTier, PinnedTier, Tier
from stowage.stages.runtime import Program
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.trace import MicroBatch, record_step, with_updates
from tests.gpu.cases import Case

STEPS = 4
"""Updates."""

SEED = 3
"""Of the generators before training."""

Schedule = Callable[[Rules], RulePlan]


@dataclass(frozen=True)
class Trained:
    """What training came to.

    Attributes:
        losses: of every micro-batch.
        tensors: parameters, buffers and optimizer states by name, in the host's memory.
        random: what the device's generator gives next.
    """

    losses: list[float]
    tensors: dict[str, torch.Tensor]
    random: torch.Tensor


def plainly(case: Case, steps: int = STEPS) -> Trained:
    """By plain PyTorch; on a GPU twice, so that what differs from it is not what differs anyway."""
    found = _plainly(case, steps)
    if case.on_gpu:
        assert differences(_plainly(case, steps), found) == [], "plain PyTorch does not repeat itself"
    return found


def _plainly(case: Case, steps: int) -> Trained:
    model, batches = case.build()
    optimizer = case.optimizer(model.parameters())
    torch.manual_seed(SEED)
    losses = [plain_step(case, model, optimizer, batches) for _ in range(steps)]
    return came_to(case, [loss for step in losses for loss in step], model, optimizer)


def plain_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    """One update of plain PyTorch: the losses of its micro-batches."""
    losses: list[float] = []
    for batch in batches:
        loss = case.loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
    if case.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses


@cache
def traced(case: Case, micro_batch: int = 0) -> Rules:
    """The iteration of one micro-batch of an update; the last one updates."""
    model, batches = case.build()
    recorded = record_step(model, batches[micro_batch], objective=case.loss)
    names = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    does = MicroBatch(
        waiting=names if micro_batch else frozenset(),
        update=micro_batch == case.micro_batches - 1,
        max_grad_norm=case.max_grad_norm,
    )
    return Rules(with_updates(recorded, model, optimizer=case.optimizer(model.parameters()), micro_batch=does))


class Planned:
    """A model that trains under plans.

    Attributes:
        programs: of the micro-batches of one update.
    """

    def __init__(
        self,
        case: Case,
        schedule: Schedule,
        tier: Tier | None = None,
        others: Iterable[Schedule] = (),
        of: Callable[[Case, int], Rules] = traced,
    ) -> None:
        """`others`: schedules that take turns with the first one, update by update; `of` gives what they schedule."""
        self.case = case
        self.model, self.batches = case.build()
        self.optimizer = case.optimizer(self.model.parameters())
        self.offloading = Offloading(tier, self.model, self.optimizer) if tier is not None else None
        self._of = of
        self._rounds = [self._programs(one) for one in (schedule, *others)]
        self._next = 0

    def _programs(self, schedule: Schedule) -> list[Program]:
        found: list[Program] = []
        for number in range(self.case.micro_batches):
            one = self._of(self.case, number)
            found.append(one.program(schedule(one), self.model, self.optimizer, self.offloading))
        return found

    @property
    def programs(self) -> list[Program]:
        """Of the next update."""
        return self._rounds[self._next % len(self._rounds)]

    def step(self) -> list[float]:
        """One update: the losses of its micro-batches."""
        losses = [float(program(batch)) for program, batch in zip(self.programs, self.batches, strict=True)]
        self._next += 1
        return losses

    def train(self, steps: int = STEPS) -> Trained:
        """From the seed on; everything is on the device afterwards."""
        torch.manual_seed(SEED)
        losses = [loss for _ in range(steps) for loss in self.step()]
        return self.trained(losses)

    def trained(self, losses: list[float]) -> Trained:
        """What it has come to."""
        if self.offloading is not None:
            self.offloading.fetch_all()
        return came_to(self.case, losses, self.model, self.optimizer)


def planned(case: Case, schedule: Schedule, tier: Tier | None = None, steps: int = STEPS) -> Trained:
    """Under plans."""
    found = Planned(case, schedule, tier).train(steps)
    if tier is not None:
        tier.close()
    return found


def came_to(case: Case, losses: list[float], model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    tensors = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    names = {p: n for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        tensors.update({f"{names[parameter]}::{k}": torch.as_tensor(v) for k, v in state.items()})
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    return Trained(losses, copies, torch.rand(4, device=case.device).cpu())


def differences(found: Trained, expected: Trained) -> list[str]:
    """Names of what is not the same, bit for bit."""
    wrong = [] if found.losses == expected.losses else [f"losses {found.losses}, expected {expected.losses}"]
    wrong += [] if torch.equal(found.random, expected.random) else ["random numbers"]
    names = found.tensors.keys() | expected.tensors.keys()
    return wrong + sorted(n for n in names if not _same(found.tensors.get(n), expected.tensors.get(n)))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def assert_close(case: Case, found: Trained, expected: Trained, *, part: float = 1e-3, loss: float = 1e-4) -> None:
    """After updates by the CPU, which on the CPU differ by nothing.

    A GPU's kernels round otherwise, by some units in the last place. Adam divides by the root of the second moment:
    where that is near zero one rounding counts in full, so that single numbers may differ by as much as they move. Of
    a whole tensor the mean difference is a small part of the mean distance from where it began.

    Args:
        case, found, expected: what was trained.
        part: of that distance.
        loss: relative difference of losses.
    """
    if not case.on_gpu:
        assert differences(found, expected) == []
        return
    assert found.losses == pytest.approx(expected.losses, rel=loss)
    for name, parameter in case.build()[0].named_parameters():
        end = expected.tensors[name].double()
        moved = (end - parameter.detach().cpu().double()).abs().mean()
        assert moved > 0, f"{name} does not train"
        assert (found.tensors[name].double() - end).abs().mean() < part * moved, name


def expect_known_failures(request: pytest.FixtureRequest, case: Case) -> None:
    """PyTorch 2.11's fake kernel of the CPU's recurrent layers says that gradients in bfloat16 come out of their
    backward; they are in float32. So the trace lacks the casts that eager makes, and a step cannot take them.

    On processors without AVX-512, oneDNN has no recurrent layer in bfloat16: plain PyTorch cannot train it either.
    """
    half = case.autocast or case.dtype == torch.bfloat16
    if not (case.model == "recurrent" and case.device == "cpu" and half):
        return
    try:
        plainly(case, steps=1)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("plain PyTorch has no recurrent layer in bfloat16 on this processor")
    if torch.__version__.startswith("2.11."):
        request.node.add_marker(pytest.mark.xfail(strict=True, reason="gradients of another type than the trace says"))


def a_tier(device: str) -> Tier:
    """Below a device."""
    return NullTier() if device == "cpu" else PinnedTier(device)

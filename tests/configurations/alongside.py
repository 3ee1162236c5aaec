"""Train under plans and beside it in plain PyTorch, micro-batch by micro-batch, and compare everything bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.flows import TrainingStep
from stowage.stages.ir.errors import MIB
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import Batch, sample_batch
from tests.runtime.beside_eager import differences, same

SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 96}
Around = Callable[[], AbstractContextManager[Any]]


def small_gpt2(**changes: Any) -> nn.Module:
    """Two layers, dropout on; the same weights each time."""
    return build_model("gpt2", SMALL | changes, seed=0)


def batches(model: nn.Module, count: int, rows: int = 4, length: int = 24) -> list[Batch]:
    """Different ones."""
    return [sample_batch(model, rows, length, seed) for seed in range(count)]


@dataclass
class Plain:
    """Plain PyTorch: what a training loop without Stowage does."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor] = lambda outputs, batch: outputs.loss
    max_grad_norm: float | None = None
    around: Around = nullcontext
    norm: torch.Tensor | None = None

    def __call__(self, batch: Any, *, update: bool = True) -> torch.Tensor:
        with self.around():
            outputs = self.model(**batch) if isinstance(batch, dict) else self.model(*batch)
            value = self.loss(outputs, batch)
        torch.autograd.backward(value)
        if update:
            if self.max_grad_norm is not None:
                self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            for parameter in self.model.parameters():
                if id(parameter) in held:
                    parameter.grad = None
        return value.detach()


def assert_equal(
    step: TrainingStep,
    plain: Plain,
    given: Sequence[Any],
    updates: Sequence[bool],
    *,
    around: Around = nullcontext,
    moves: bool = True,
) -> None:
    """Losses, gradients that wait, norms, parameters, buffers, states and the random state, after every micro-batch."""
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        state = torch.get_rng_state()
        for number, (batch, update) in enumerate(zip(given, updates, strict=True)):
            torch.set_rng_state(state)
            expected = plain(batch, update=update)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            with around():
                found = step(batch, update=update)
            assert torch.equal(torch.get_rng_state(), after), f"random state after micro-batch {number}"
            assert same(found, expected), f"loss of micro-batch {number}: {found} and {expected}"
            assert differences(step.model, plain.model) == [], f"micro-batch {number}"
            assert step.optimizer is not None
            assert same(step.optimizer.state_dict(), plain.optimizer.state_dict()), f"states, micro-batch {number}"
            if update:
                assert same(step.grad_norm, plain.norm), f"norm of micro-batch {number}"
            state = after
    if moves:
        still = [n for n, p in step.model.named_parameters() if p.requires_grad and torch.equal(p, before[n])]
        assert still == [], "every parameter moves"


def assert_measured(step: TrainingStep, batch: Any, *, update: bool = True) -> None:
    """One more micro-batch, as large as its plan says."""
    peak = step.measure(batch, update=update).peak_bytes
    plan = step.plan
    assert peak <= plan.device_budget_bytes
    assert abs(peak - plan.device_peak_bytes) <= max(0.02 * plan.device_peak_bytes, MIB / 64)

"""A user's training script under a plan, beside the same script in plain PyTorch: everything it sees is equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.workload.calls import call_model

ROWS = 600
"""Of a batch: activations outweigh the weights of these models."""
WIDTH = 8


@dataclass
class Script:
    """What a user has written.

    Attributes:
        model: it trains.
        optimizer: holds whatever trains; None leaves gradients.
        loss: `loss(outputs, batch)`.
        batches: one a step.
        between: called after each step, with its number.
        seen: what the user looks at in the end.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loss: Callable[[Any, Any], torch.Tensor]
    batches: Sequence[Any]
    between: Callable[[int], None] = lambda number: None
    seen: Callable[[], Any] = lambda: None


Make = Callable[[], Script]


def mlp(dropout: float = 0.1) -> nn.Sequential:
    """Three layers."""
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, WIDTH)
    )


def rows(count: int = 4, *, requires_grad: bool = False) -> list[torch.Tensor]:
    """Batches of numbers."""
    return [torch.randn(ROWS, WIDTH, requires_grad=requires_grad) for _ in range(count)]


def square(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    """A loss."""
    return outputs.pow(2).mean()


def adamw(model: nn.Module, *more: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of everything."""
    return torch.optim.AdamW([p for module in (model, *more) for p in module.parameters()], lr=1e-2)


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, whatever it is made of."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(type(one) is type(other) and one == other)


def plainly(make: Make) -> dict[str, Any]:
    """What plain PyTorch does."""
    script = _made(make)
    losses = []
    for number, batch in enumerate(script.batches):
        loss = script.loss(call_model(script.model, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if script.optimizer is not None:
            script.optimizer.step()
            script.optimizer.zero_grad()
        losses.append(loss.detach().clone())
        script.between(number)
    return _everything(script, losses)


def planned(make: Make, budget: str, **more: Any) -> tuple[dict[str, Any], TrainingStep]:
    """What a plan does."""
    script = _made(make)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    step = fit(
        script.model,
        script.batches[0],
        script.optimizer,
        device_budget=budget,
        loss=script.loss,
        quick=True,
        say=lambda text: None,
        **more,
    )
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert str(np.random.get_state(legacy=False)) == str(state[2])
    losses = []
    for number, batch in enumerate(script.batches):
        losses.append(step(batch).detach().clone())
        script.between(number)
    return _everything(script, losses), step


def trains_equally(make: Make, budget: str = "85%", **more: Any) -> TrainingStep:
    """Both do the same."""
    mine, step = planned(make, budget, **more)
    theirs = plainly(make)
    for name, value in theirs.items():
        assert equal(mine[name], value), f"{name}: {mine[name]} under the plan, {value} in plain PyTorch"
    return step


def _made(make: Make) -> Script:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return make()


def _everything(script: Script, losses: list[torch.Tensor]) -> dict[str, Any]:
    gradients = script.optimizer is None
    return {
        "losses": losses,
        "parameters": [p.detach().clone() for p in script.model.parameters()],
        "gradients": [p.grad.clone() for p in script.model.parameters() if gradients and p.grad is not None],
        "buffers": [b.clone() for b in script.model.buffers()],
        "seen": script.seen(),
        "torch's generator": torch.get_rng_state(),
        "Python's generator": list(map(str, random.getstate())),
        "NumPy's generator": str(np.random.get_state(legacy=False)),
    }

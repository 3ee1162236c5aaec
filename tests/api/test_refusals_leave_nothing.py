"""Whatever is refused: model, optimizer, hooks, generators, modes and attributes are as before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import StowageError
from tests.api.beside_plain import WIDTH, adamw, mlp, rows, square


class Base(nn.Module):
    """Changes much before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: torch.Tensor
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.log: list[Any] = [1]
        self.calls = 0
        self.eval_part = nn.Linear(WIDTH, WIDTH).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.mean += x.mean(0)
        self.extra = x.detach()
        self.net[0].register_forward_hook(lambda *_: None)
        torch.rand(3)
        y = self.net(x) * self.scale
        self.net.eval()
        return self.fault(y)

    def fault(self, y: torch.Tensor) -> torch.Tensor:
        """What is refused."""
        raise NotImplementedError


class Branches(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y if y.sum() > 0 else -y


class Item(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y * y.sum().item()


class NonZero(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y[y > 0]


class Raises(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        raise ValueError("the user's own")


class ReplacesParameter(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        self.scale = nn.Parameter(self.scale * 0.5)
        return y


class ReplacesData(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        self.scale.data = self.scale.data * 0.5
        self.net[0].weight.data = torch.zeros(32, WIDTH)
        return y


class PythonsRandom(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y * random.random()


class NumPysRandom(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(np.random.rand())


class CountsAndReads(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.calls


class CallsBackward(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return y


class NoGradient(Base):
    def fault(self, y: torch.Tensor) -> torch.Tensor:
        return y.detach()


class TooLittleMemory(Base):
    budget = 4096

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x) * self.scale
        return out


REFUSED = [
    Branches, Item, NonZero, Raises, ReplacesParameter, ReplacesData, PythonsRandom, NumPysRandom, CountsAndReads,
    CallsBackward, NoGradient, TooLittleMemory,
]  # fmt: skip


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a user could notice."""
    modules = dict(model.named_modules())
    return {
        "names": list(model.state_dict()),
        "objects": [(n, id(t)) for n, t in [*model.named_parameters(), *model.named_buffers()]],
        "memory": [(n, t.data_ptr(), t.is_meta) for n, t in [*model.named_parameters(), *model.named_buffers()]],
        "contents": [t.detach().numpy().tobytes() for t in model.state_dict().values()],
        "modes": {name: module.training for name, module in modules.items()},
        "hooks": {name: list(module._forward_hooks) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "log": (id(model.log), list(model.log), model.calls),
        "gradients": [p.grad for p in model.parameters()],
        "flags": [(p.requires_grad, p.grad_fn, p._version) for p in model.parameters()],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "held": [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        "states": len(optimizer.state),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state(legacy=False)),
    }


@pytest.mark.parametrize("kind", REFUSED)
def test_as_before(kind: type[Base]) -> None:
    model = kind()
    optimizer, batch = adamw(model), rows(1)[0]
    before = state_of(model, optimizer)
    with pytest.raises(StowageError) as caught:
        fit(
            model,
            batch,
            optimizer,
            device_budget=getattr(kind, "budget", "90%"),
            loss=square,
            quick=True,
            say=lambda text: None,
        )
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    after = state_of(model, optimizer)
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {}

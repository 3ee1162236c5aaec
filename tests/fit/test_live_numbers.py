"""Numbers and other plain data that the step reads outside of tensors: what they are at each call, as in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowage.flows import fit
from tests.fit.live_steps import Beside

BETA = 0.1
TABLE = {"kl": {"beta": 0.1}}
ROW = [0.1, 0.7]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


def penalty(outputs: Tensor, beta: Any) -> Tensor:
    return outputs.pow(2).mean() + beta * outputs.abs().mean()


def by_global(outputs: Tensor, batch: Any) -> Tensor:
    return penalty(outputs, BETA)


def set_global(value: float) -> None:
    globals()["BETA"] = value


def by_table(outputs: Tensor, batch: Any) -> Tensor:
    return penalty(outputs, TABLE["kl"]["beta"])


def by_row(outputs: Tensor, batch: Any) -> Tensor:
    return penalty(outputs, ROW[0])


def by_default(outputs: Tensor, batch: Any, beta: float = 0.1) -> Tensor:
    return penalty(outputs, beta)


def set_default(value: float) -> None:
    by_default.__defaults__ = (value,)


@dataclass
class Config:
    beta: float = 0.1


class Loss:
    """A user's loss."""

    def __init__(self) -> None:
        self.config = Config()
        self.names = ["a"]

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, self.config.beta)

    def mixed(self, outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, 1 - self.config.beta) * self.config.beta


LOSS = Loss()


def closing() -> tuple[Callable[[Tensor, Any], Tensor], Callable[[float], None]]:
    beta = 0.1

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, beta)

    def set_beta(value: float) -> None:
        nonlocal beta
        beta = value

    return loss, set_beta


CLOSED, SET_CLOSED = closing()

CASES: dict[str, tuple[Any, Callable[[float], Any]]] = {
    "closure": (CLOSED, SET_CLOSED),
    "global": (by_global, set_global),
    "default argument": (by_default, set_default),
    "partial": (functools.partial(by_default), set_default),
    "list": (by_row, lambda v: ROW.__setitem__(0, v)),
    "dictionary": (by_table, lambda v: TABLE["kl"].update(beta=v)),
    "dataclass of an object": (LOSS, lambda v: setattr(LOSS.config, "beta", v)),
    "another dataclass": (LOSS, lambda v: setattr(LOSS, "config", Config(v))),
    "method": (LOSS.mixed, lambda v: setattr(LOSS.config, "beta", v)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_is_annealed_plans_once(name: str, fit_home: Path) -> None:
    loss, set_beta = CASES[name]
    beside = Beside(network)
    batch = (torch.randn(64, 8),)
    set_beta(0.1)
    step = fit(
        beside.ours, batch, beside.optimizer, loss=loss, device_budget="85%", cache_dir=fit_home, quick=True, say=print
    )
    for beta in (0.1, 0.2, 0.3, 0.4, 0.45, 0.1, 0.0, -0.5, 0.0):
        set_beta(beta)
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))
    assert beside.plans(step) == 1

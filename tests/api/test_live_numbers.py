"""Numbers and other plain data that the step reads are what they are at each call, as in plain PyTorch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from tests.api.live_steps import Beside

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
        self.parts = ["be"]

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, self.config.beta)

    def computed(self, outputs: Tensor, batch: Any) -> Tensor:
        return sum((penalty(outputs, getattr(self.config, name + "ta")) for name in self.parts), torch.zeros(()))

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
    "attribute by a computed name": (LOSS.computed, lambda v: setattr(LOSS.config, "beta", v)),
    "another dataclass": (LOSS, lambda v: setattr(LOSS, "config", Config(v))),
    "method": (LOSS.mixed, lambda v: setattr(LOSS.config, "beta", v)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_is_annealed_plans_once(name: str, fit_stores: Path) -> None:
    loss, set_beta = CASES[name]
    beside = Beside(network)
    batch = (torch.randn(64, 8),)
    set_beta(0.1)
    step = fit(
        beside.ours,
        batch,
        beside.optimizer,
        loss=loss,
        device_budget="85%",
        cache_dir=fit_stores,
        quick=True,
        say=print,
    )
    for beta in (0.1, 0.2, 0.3, 0.4, 0.45, 0.1, 0.0, -0.5, 0.0):
        set_beta(beta)
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))
    assert beside.plans(step) == 1


def test_variables_of_the_environment_count(fit_stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, float(os.environ.get("PENALTY", "0.1")))

    beside = Beside(network)
    batch = (torch.randn(64, 8),)
    step = fitted(beside, batch, fit_stores, loss=loss)
    for beta in ("0.1", "0.5", "0.1"):
        monkeypatch.setenv("PENALTY", beta)
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))


def traces(step: TrainingStep) -> int:
    """Recorded steps that are told apart."""
    return len(step.programs.live.traced)


def fitted(beside: Beside, batch: Any, stores: Path, **more: Any) -> TrainingStep:
    return fit(beside.ours, batch, beside.optimizer, device_budget="85%", cache_dir=stores, quick=True, **more)


class Switched:
    """A loss that changes its way."""

    def __init__(self) -> None:
        self.way, self.square, self.steps, self.note = "l1", True, 0, "first"
        self.scale: Any = 1.5

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.steps < 0 or not self.note:
            raise AssertionError("never")
        value = outputs.abs().mean() if self.way == "l1" else outputs.pow(2).mean()
        return value.pow(2) * self.scale if self.square else value * self.scale


def test_another_way_is_another_plan_and_the_old_one_is_kept(fit_stores: Path) -> None:
    beside, loss, batch = Beside(network), Switched(), (torch.randn(64, 8),)
    step = fitted(beside, batch, fit_stores, loss=loss)
    for way, square in [("l1", True), ("l2", True), ("l1", True), ("l2", False), ("l2", True), ("l1", True)]:
        loss.way, loss.square = way, square
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))
    assert beside.plans(step) == traces(step) == 3


def test_what_does_not_matter_is_soon_no_longer_looked_at(fit_stores: Path) -> None:
    beside, loss, batch = Beside(network), Switched(), (torch.randn(64, 8),)
    said: list[str] = []
    step = fitted(beside, batch, fit_stores, loss=loss, say=said.append)
    records = counted(step)
    for number in range(6):
        loss.steps, loss.note = number, f"note {number}"
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))
    assert beside.plans(step) == 1
    assert records() == 3
    assert any("loss.steps: other at each call" in text for text in said)


def counted(step: TrainingStep) -> Callable[[], int]:
    """How often the step has been recorded again since."""
    live, count = step.programs.live, [0]
    record = live._record

    def counting(batch: Any) -> Any:
        count[0] += 1
        return record(batch)

    live._record = counting
    return lambda: count[0]


def test_a_tensor_made_of_a_number(fit_stores: Path) -> None:
    beside, holder, batch = Beside(network), SimpleNamespace(beta=0.1), (torch.randn(64, 8),)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, torch.tensor(holder.beta))

    step = fitted(beside, batch, fit_stores, loss=loss)
    for beta in (0.1, 0.2, 0.3, 0.4, 0.1, 0.5):
        holder.beta = beta
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))
    assert beside.plans(step) == 1


def test_a_type_is_another_step(fit_stores: Path) -> None:
    beside, loss, batch = Beside(network), Switched(), (torch.randn(64, 8),)
    step = fitted(beside, batch, fit_stores, loss=loss)
    for scale in (1.5, 2, 3, 4, 2.5, 1.5, 1, 1.0, -3):
        loss.scale = scale
        beside.equal(lambda: step(batch), lambda: loss(beside.eager(*batch), batch))


def test_numbers_of_modules(fit_stores: Path) -> None:
    """A rate of dropout, and an attribute of the user's module."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale, self.settings = network(), 0.5, {"shift": 0.1, "name": "a"}

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) * self.scale + self.settings["shift"]).pow(2).mean()

    beside, batch = Beside(Scaled), (torch.randn(64, 8),)
    step = fitted(beside, batch, fit_stores)
    records = counted(step)
    for number in range(7):
        for model in (beside.ours, beside.eager):
            model.body[2].p = 0.3 + number / 100
            model.scale = 0.5 + number / 20
            model.settings = {"shift": number / 7 + 0.1, "name": "ab"}
        beside.equal(lambda: step(batch), lambda: beside.eager_loss(batch))
    assert beside.plans(step) == 1
    assert records() == 3


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, count: int, name: str = "", flags: Any = ()) -> Tensor:
        return self.body(x).pow(2).sum() / count


def test_numbers_and_names_in_the_batch(fit_stores: Path) -> None:
    beside = Beside(Weighted)
    batches = [
        {"x": torch.randn(64, 8), "count": 100 + 7 * n, "name": f"{n}.png", "flags": [n, {"id": str(n)}]}
        for n in range(7)
    ]
    step = fitted(beside, batches[0], fit_stores)
    records = counted(step)
    for batch in batches:
        beside.equal(lambda: step(batch), lambda: beside.eager_loss(batch))  # noqa: B023
    assert beside.plans(step) == 1
    assert records() == 2


def test_micro_batches_share_what_is_found(fit_stores: Path) -> None:
    beside, holder = Beside(network), SimpleNamespace(beta=0.1)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return penalty(outputs, holder.beta) / 2

    first, second = (torch.randn(64, 8),), (torch.randn(64, 8),)
    step = fitted(beside, first, fit_stores, loss=loss, accumulate=2)
    for beta in (0.1, 0.2, 0.3, 0.4, 0.5):
        holder.beta = beta

        def ours() -> Tensor:
            return step(first, update=False) + step(second)

        def theirs() -> Tensor:
            one = loss(beside.eager(*first), first)
            one.backward()  # type: ignore[no-untyped-call]
            return loss(beside.eager(*second), second) + one.detach()

        beside.equal(ours, theirs)
    assert beside.plans(step) == 2


def test_names_in_a_batch_do_not_plan_anew(fit_stores: Path) -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, batch: Any) -> Tensor:
            return (self.body(batch["x"]) - batch["y"]).pow(2).mean()

    beside = Beside(Picking)
    batches = [
        [
            {
                "x": torch.randn(64, 8),
                "y": torch.randn(64, 4),
                "names": [f"{n}.png", "b"],
                "owner": SimpleNamespace(id=n, lock=object()),
            }
        ]
        for n in range(6)
    ]
    step = fitted(beside, batches[0], fit_stores)
    for batch in batches:
        beside.equal(lambda: step(batch), lambda: beside.eager_loss(batch))  # noqa: B023
    assert beside.plans(step) == 1

"""States of parameters that a step does not use lie in memory all the same, and count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.machine import DISK_STAGING_BYTES
from stowage.stages.optimizers import signature_of

Batch = tuple[torch.Tensor, str]


class TwoHeads(nn.Module):
    """A batch names the head that it is for."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.heads = nn.ModuleDict({n: nn.Sequential(nn.Linear(width, width), nn.GELU()) for n in "ab"})

    def forward(self, x: torch.Tensor, head: str) -> Any:
        return self.heads[head](self.body(x))


def batch(head: str, width: int = 32) -> Batch:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(1)), head


def loss(outputs: torch.Tensor, given: Batch) -> torch.Tensor:
    return outputs.square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def jointly(model: nn.Module) -> torch.optim.Optimizer:
    """It updates all parameters in one step, since its norm is of all of them."""

    class Jointly(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            torch._foreach_div_(gradients, norm)
            return super().step(closure)

    return Jointly(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("optimizer", [adamw, jointly])
@pytest.mark.parametrize("budget", ["100%", "smallest"])
def test_of_another_head(budget: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path) -> None:
    model = TwoHeads()
    step = fit(
        model, batch("a"), optimizer(model), device_budget=budget, loss=loss, cache_dir=tmp_path, say=lambda text: None
    )
    for head in "ab":
        step(batch(head))
    for head in "ab":
        measured = step.measure(batch(head))
        assert measured.peak_bytes <= step.plan.device_budget_bytes
        assert step.plan.device_peak_bytes - measured.peak_bytes < 1024


def test_of_parameters_that_have_been_frozen(tmp_path: Path) -> None:
    model = TwoHeads()
    optimizer = adamw(model)
    loss(model(*batch("b")), batch("b")).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.heads["b"].requires_grad_(False)
    how: dict[str, Any] = {"device_budget": "100%", "loss": loss, "cache_dir": tmp_path, "say": lambda text: None}
    with_states = fit(model, batch("a"), optimizer, **how)
    without = fit(model, batch("a"), adamw(model), **how)
    states = sum(t.nbytes for p in model.heads["b"].parameters() for t in optimizer.state[p].values())
    assert with_states.plan.device_peak_bytes == without.plan.device_peak_bytes + states
    assert with_states.measure(batch("a")).peak_bytes <= with_states.plan.device_budget_bytes


def test_new_ones_of_frozen_parameters_lead_to_a_new_plan() -> None:
    model = TwoHeads()
    optimizer = adamw(model)
    model.heads["b"].requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters()}
    before = signature_of(optimizer)
    bias = model.heads["b"].get_parameter("0.bias")
    optimizer.state[bias] = {"exp_avg": torch.zeros(32)}
    assert before.differences(signature_of(optimizer), names) == [
        "heads.b.0.bias requires no gradient, and its states are new."
    ]


def test_while_others_are_offloaded(tmp_path: Path) -> None:
    width, heads = 512, "abab"
    plain = TwoHeads(width)
    optimizer, expected = adamw(plain), []
    for head in heads:
        expected.append(loss(plain(*batch(head, width)), batch(head, width)))
        expected[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    model = TwoHeads(width)
    step = fit(
        model,
        batch("a", width),
        adamw(model),
        device_budget=DISK_STAGING_BYTES + 8 * width * width * 4,
        offload_dir=tmp_path / "disk",
        loss=loss,
        cache_dir=tmp_path,
        quick=True,
        say=lambda text: None,
    )
    for head, value in zip(heads, expected, strict=True):
        measured = step.measure(batch(head, width))
        assert measured.loss == float(value.detach())
        assert measured.peak_bytes <= step.plan.device_budget_bytes
    with step.on_device():
        states = step.optimizer.state_dict()["state"] if step.optimizer is not None else {}
        for number, of_plain in optimizer.state_dict()["state"].items():
            assert all(torch.equal(states[number][key], value) for key, value in of_plain.items())

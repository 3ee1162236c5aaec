"""Parameters, gradients and states that are offloaded, read by the user's own code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import Infeasible, OffloadedError
from stowage.stages.runtime.offload.offloaded_tensor import arrive, leave
from tests.offload.test_averages_of_offloaded_weights import adamw, network


@pytest.fixture(scope="module")
def step(fit_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingStep:
    """After two iterations, most of it offloaded."""
    model, batch = network(), torch.ones(8, 512)
    how: dict[str, Any] = {
        "loss": lambda outputs, batch: outputs.pow(2).mean(),
        "method": "offmate",
        "offload_dir": tmp_path_factory.mktemp("lower_tier"),
        "cache_dir": fit_stores,
        "quick": True,
        "say": lambda text: None,
    }
    with pytest.raises(Infeasible) as caught:
        fit(model, batch, adamw, device_budget=1, **how)
    step = fit(model, batch, adamw, device_budget=caught.value.smallest_feasible_bytes * 11 // 10, **how)
    for _ in range(2):
        step(batch)
    return step


def lower_tier(step: TrainingStep) -> nn.Parameter:
    """A parameter whose content and states are offloaded."""
    offloading = step.programs.offloading
    assert offloading is not None
    found: Any = next(iter(offloading.offloaded_parameters().values()))
    return found


def other(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(weight.shape)


def norm(weights: Any) -> Any:
    return torch.nn.utils.get_total_norm([w.detach() for w in weights])


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "average": lambda w: other(w).lerp_(w, 0.1),
    "average of data": lambda w: other(w).lerp_(w.data, 0.1),
    "average of what is detached": lambda w: other(w).mul_(0.9).add_(w.detach(), alpha=0.1),
    "all at once": lambda w: torch._foreach_lerp_([other(w)], [w.detach()], 0.1),
    "norm": lambda w: norm([w]),
    "number": lambda w: w[0, 0].item(),
    "sum": lambda w: w.sum(),
    "arithmetic": lambda w: w * 2,
    "comparison": lambda w: w == 1,
    "transposed": lambda w: w.T,
    "elsewhere": lambda w: w.to(torch.float64),
    "copy": lambda w: w.clone(),
    "deep copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "NumPy": lambda w: w.detach().numpy(),
    "list": lambda w: w.tolist(),
    "function": lambda w: nn.functional.linear(torch.ones(1, 512), w),
    "in a list": lambda w: torch.stack([w, w]),
    "written": lambda w: w.detach().zero_(),
    "written to": lambda w: nn.init.zeros_(w),
    "another tensor": lambda w: setattr(w, "data", other(w)),
}


@pytest.mark.parametrize("name", READS)
@torch.no_grad()
def test_reading_or_writing_says_where_it_is(name: str, step: TrainingStep) -> None:
    with pytest.raises(OffloadedError, match=r"Parameter '.*' is offloaded.*on_device\(\).*contents\(\)"):
        READS[name](lower_tier(step))


def test_states_too(step: TrainingStep) -> None:
    state = step.optimizer.state[lower_tier(step)]
    with pytest.raises(OffloadedError, match=r"State 'exp_avg' of parameter '.*' is offloaded"):
        state["exp_avg"].abs().mean()


def test_the_form_is_known(step: TrainingStep) -> None:
    weight = lower_tier(step)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.numel(), weight.device.type) == (
        (512, 512),
        torch.float32,
        512**2,
        "cpu",
    )
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert weight.to(torch.float32) is weight
    assert torch.zeros_like(weight).sum() == 0
    assert "offloaded" in repr(weight)
    assert sum(p.numel() for p in step.model.parameters()) == 6 * (512**2 + 512)


def test_inside_of_on_device_everything_is_as_it_was(step: TrainingStep) -> None:
    weight = lower_tier(step)
    with step.on_device() as model:
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all(type(s) is torch.Tensor for s in step.optimizer.state[weight].values())
        assert not torch.stack([p.isnan().any() for p in model.parameters()]).any()
        assert not vars(weight)
    assert float(step(torch.ones(8, 512))) >= 0
    with pytest.raises(OffloadedError):
        weight.sum()


class Scaled(nn.Parameter):
    """A parameter of a class of the user's own."""


def test_classes_of_ones_own() -> None:
    weight = Scaled(torch.ones(3))
    leave(weight, "scale")
    assert isinstance(weight, Scaled)
    assert weight.type() == "torch.FloatTensor"
    with pytest.raises(OffloadedError, match="Parameter 'scale' is offloaded"):
        weight.add(1)
    arrive(weight)
    assert type(weight) is Scaled
    assert not vars(weight)
    assert weight.sum() == 3

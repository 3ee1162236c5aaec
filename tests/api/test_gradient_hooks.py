"""Hooks of parameters run as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stowage.flows import fit
from stowage.stages.ir.errors import TraceError
from tests.api.beside_plain import Script, adamw, mlp, rows, square, trains_equally


def scaled() -> Script:
    """A tensor hook that changes a gradient."""
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[3].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return Script(model, adamw(model), square, rows())


def clipped_when_complete() -> Script:
    """A hook on the complete gradient that changes it in place, before the optimizer sees it."""
    model = mlp()

    def hook(parameter: Any) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return Script(model, adamw(model), square, rows())


def optimizer_in_backward() -> Script:
    """Every parameter has an optimizer of its own, which its hook steps."""
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return Script(model, None, square, rows())


def added_after_a_step() -> Script:
    """A hook that appears later."""
    model = mlp()

    def between(number: int) -> None:
        if number == 1:
            model[0].weight.register_hook(lambda gradient: gradient * 2)

    return Script(model, adamw(model), square, rows(), between)


@pytest.mark.parametrize("make", [scaled, clipped_when_complete, optimizer_in_backward, added_after_a_step])
def test_hooks_run(make: Any) -> None:
    trains_equally(make)


def test_a_hook_on_complete_gradients_is_refused_with_clipping() -> None:
    script = clipped_when_complete()
    with pytest.raises(TraceError, match=r"Parameter '0\.weight' has a hook .* use register_hook"):
        fit(script.model, script.batches[0], script.optimizer, device_budget="90%", loss=square, max_grad_norm=1.0)

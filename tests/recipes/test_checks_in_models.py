"""Models that look at values only to raise: such a step is planned, and says so where a check fails later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import StaleStep, TraceError
from tests.api.beside_plain import Script, adamw, mlp, rows, square, trains_equally
from tests.matrix import some


class Checked(nn.Module):
    """A module that checks what it is given."""

    def __init__(self, check: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.net = mlp()
        self.check = check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(x)
        y: torch.Tensor = self.net(x)
        return y


def finite(x: torch.Tensor) -> None:
    """The most common one."""
    if not torch.isfinite(x).all():
        raise ValueError("not finite")


def no_nan(x: torch.Tensor) -> None:
    """The other way round."""
    if torch.isnan(x).any():
        raise ValueError("nan")


def both(x: torch.Tensor) -> None:
    """Several."""
    assert (x < 1e6).all(), "too large"
    no_nan(x)
    finite(x)


CHECKS = [finite, no_nan, both]


@pytest.mark.parametrize("check", some(CHECKS, [both]))
def test_plain_numbers(check: Callable[[torch.Tensor], None], fit_stores: Path) -> None:
    def make() -> Script:
        model = Checked(check)
        return Script(model, adamw(model), square, rows())

    trains_equally(make, "100%", cache_dir=fit_stores)


@pytest.mark.parametrize("check", some(CHECKS, [no_nan]))
def test_a_check_that_fails_is_said(check: Callable[[torch.Tensor], None], fit_stores: Path) -> None:
    model = Checked(check)
    given = rows(2)
    step = fit(
        model,
        given[0],
        adamw(model),
        loss=square,
        device_budget="100%",
        quick=True,
        check="never",
        cache_dir=fit_stores,
        say=lambda text: None,
    )
    step(given[0])
    with pytest.raises(StaleStep, match=r"raises (ValueError|AssertionError) in the model") as caught:
        step(torch.full_like(given[1], float("nan")))
    assert "\n" not in str(caught.value)


def test_what_the_step_does_is_no_check(fit_stores: Path) -> None:
    def branch(outputs: Any, _: Any) -> torch.Tensor:
        value: torch.Tensor = outputs.pow(2).mean()
        return value * 2 if value > 0 else value * 3

    model = mlp()
    with pytest.raises(TraceError, match="control flow"):
        fit(model, rows(1)[0], adamw(model), loss=branch, device_budget="100%", quick=True, cache_dir=fit_stores)


def test_what_cannot_be_traced_behind_a_check_is_said_itself(fit_stores: Path) -> None:
    """Not the check, which does not fail in a step."""

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        no_nan(outputs)
        selected: torch.Tensor = outputs.masked_select(batch > 0)
        return selected.pow(2).mean()

    model = mlp()
    with pytest.raises(TraceError, match=r"shape depends on data \(aten.masked_select"):
        fit(model, rows(1)[0], adamw(model), loss=loss, device_budget="100%", quick=True, cache_dir=fit_stores)

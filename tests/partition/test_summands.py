"""Summands that a sum may be written over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.ir.sums import takes_of
from stowage.stages.trace import trace_step

Y = "tanh"
Z = "exp"


class Sums(nn.Module):
    """What a function makes of two fresh matrices, y and z."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.scale
        return self.function(torch.tanh(x), torch.exp(x)).pow(2).mean()


@pytest.mark.parametrize(
    ("function", "makers"),
    [
        (lambda y, z: y + z, [Y, Z]),
        (lambda y, z: z + y, [Z, Y]),
        (lambda y, z: y + z.t(), [Y]),  # the sum is laid out as the first
        (lambda y, z: y.t() + z.t(), [Y, Z]),
        (lambda y, z: y + z[:1], [Y]),
        (lambda y, z: y[:1] + z, [Z]),
        (lambda y, z: y[:3] + z[:3], []),  # parts of their storages
        (lambda y, z: torch.add(y, z, alpha=2), []),
        (lambda y, z: y + 1.0 + 0 * z, []),
        (lambda y, z: (y + y) * z, []),
        (lambda y, z: y.double() + z, []),
        (lambda y, z: torch.ones(6, 6) + z * y, ["ones", "mul"]),
    ],
)
def test_which_storages(function: Any, makers: list[str]) -> None:
    trace = trace_step(Sums(function), torch.linspace(-1, 1, 36).reshape(6, 6), loss=lambda outputs, _: outputs)
    call = next(c for c in trace.calls if c.phase == "forward" and c.target.startswith("aten.add."))
    maker = {trace.values[v].storage: c.target for c in reversed(trace.calls) for v in c.returns if v >= 0}
    assert [maker[s].split(".")[1] for s in takes_of([call], trace)] == makers
    assert takes_of([call, call], trace) == ()


def test_nothing_that_is_there_before_the_step() -> None:
    trace = trace_step(
        Sums(lambda y, z: y * z), torch.ones(6, 6), loss=lambda outputs, batch: (outputs + batch + batch.exp()).sum()
    )
    sums = [c for c in trace.calls if c.phase == "forward" and c.target == "aten.add.Tensor"]
    assert len(sums) == 2
    for call in sums:
        for storage in takes_of([call], trace):
            assert trace.storages[storage].role == "temporary"

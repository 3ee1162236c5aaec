"""The first use of an operator puts it into its namespace, which is PyTorch's and no module that a program made."""

from __future__ import annotations

import types

import torch
from torch import nn

from stowage.stages.structure.code import is_made
from stowage.stages.trace import trace_step


class Named(nn.Module):
    """Calls an operator of a namespace that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.operators = nn.Linear(4, 4), torch.ops.aten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.operators.sinh(self.linear(x)).sum()
        return found


def test_an_operator_that_was_never_used_before() -> None:
    namespace = vars(torch.ops.aten)
    namespace.pop("sinh", None)
    trace = trace_step(Named(), torch.ones(2, 4), loss=lambda loss, _: loss)
    assert any("sinh" in call.target for call in trace.calls)
    assert "sinh" in namespace


def test_a_module_that_a_program_made_is_none_of_pytorchs() -> None:
    assert is_made(types.ModuleType("settings"))
    assert not is_made(torch.ops.aten)
    assert not is_made(torch.ops)
    assert not is_made(torch)

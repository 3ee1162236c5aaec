"""Functions under `torch.compile` that a step enters are refused; those that are not compiled are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.nn import functional as F

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace import trace_step

X = torch.ones(4, 4)


@torch.compile
def gelu_twice(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.gelu(x))


@torch.compiler.disable
def left_alone(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


class Calls(nn.Module):
    def __init__(self, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.behind = nn.Linear(4, 4), behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.layer(x))

    @torch.compile
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


def mean(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().mean()


def refused(model: nn.Module, loss: Any = mean) -> str:
    before = vars(eval_frame)["_callback_from_stance"]
    with pytest.raises(TraceError, match=r"under torch\.compile") as caught:
        trace_step(model, (X,), loss=loss)
    assert vars(eval_frame)["_callback_from_stance"] is before
    assert str(caught.value).endswith("call the function itself, which the plan takes the place of.")
    return str(caught.value)


def test_what_is_called() -> None:
    function = refused(Calls(gelu_twice))
    assert "test_compiled_functions.py" in function
    assert "(gelu_twice)" in function
    method = Calls(gelu_twice)
    method.behind = method.method
    assert "(Calls.method)" in refused(method)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole[1].compile()
    assert "(Linear.forward)" in refused(whole)
    assert refused(nn.Linear(4, 4), lambda outputs, _: gelu_twice(outputs).mean()).startswith("The loss (")


def test_what_is_not_compiled() -> None:
    trace_step(Calls(left_alone), (X,), loss=mean)
    trace_step(Calls(lambda x: gelu_twice(x) if x.dim() > 2 else x), (X,), loss=mean)
    with torch.compiler.set_stance("force_eager"):
        trace_step(Calls(gelu_twice), (X,), loss=mean)


def test_refusals_leave_the_compiler_as_it_was() -> None:
    refused(Calls(gelu_twice))
    trace_step(Calls(left_alone), (X,), loss=mean)
    eager = torch.compile(lambda x: x + 1, backend="eager")
    assert torch.equal(eager(X), X + 1)

"""Operators that a step calls as methods of tensors: what is dispatched is the recorded call, with its arguments."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.flows._remat_modules import Mamba
from stowage.stages.ir.arguments import split_receiver
from stowage.stages.ir.operators import METHODS
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.profile.arguments import kernel_of, make_arguments, operator_of
from stowage.stages.trace import trace_step
from tests.zoo import ZOO

FEW = 12
"""Calls of an operator that are tried; they differ in shapes, scalars and keywords."""

MODELS = (
    "mistral",
    "gpt2_mask",
    "bloom",
    "t5",
    "transformer",
    "lstm",
    "batchnorm",
    "in_place",
    "y_sum",
    "returns_input",
)
"""Of the zoo: with a scan they call every operator that a step calls as a method."""


class Dispatched(TorchDispatchMode):
    """Notes what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@cache
def recorded() -> dict[str, dict[str, tuple[Call, TraceTables]]]:
    """Calls of models by operator and signature."""
    found: dict[str, dict[str, tuple[Call, TraceTables]]] = defaultdict(dict)
    scan = Mamba(vocabulary=8, width=4, layers=1, states=2), (torch.arange(3)[None],), lambda y, _: y.exp().mean()
    for model, batch, loss in (*(ZOO[name]() for name in MODELS), scan):
        trace = trace_step(model, batch, loss=loss)
        for call in trace.calls:
            if call.target in METHODS:
                found[call.target].setdefault(call.signature, (call, trace))
    return found


def alike(a: Any, b: Any) -> bool:
    """The same tensors and equal plain values of the same kinds."""
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("target", sorted(METHODS))
def test_a_method_dispatches_the_recorded_call(target: str) -> None:
    calls = list(recorded()[target].values())
    assert calls, "none of the models calls it: leave it out, or add one that does"
    for call, trace in calls[:: max(1, len(calls) // FEW)]:
        args, kwargs = make_arguments(call, trace, torch.device("cpu"))
        with torch.no_grad(), Dispatched() as dispatched:
            kernel_of(call)(*args, **kwargs)
        ((operator, seen, named),) = dispatched.calls
        assert operator is operator_of(target)
        assert alike(args, seen)
        assert kwargs.keys() == named.keys()
        assert all(alike(value, named[name]) for name, value in kwargs.items())


def test_others_are_called_as_operators() -> None:
    """`x.mul(2.0)` would dispatch `aten.mul.Tensor`, where 2.0 is recorded as a scalar."""
    assert "aten.mul.Scalar" not in METHODS
    with Dispatched() as dispatched:
        torch.ones(2).mul(2.0)
    assert [str(operator) for operator, _, _ in dispatched.calls] == ["aten.ones.default", "aten.mul.Tensor"]


def test_a_first_argument_that_is_no_tensor_has_no_methods() -> None:
    assert split_receiver('{"args": [2.0, {"value": 3}], "kwargs": {}}') is None
    assert split_receiver('{"args": [], "kwargs": {}}') is None
    assert split_receiver('{"args": [{"value": 3}, [4]], "kwargs": {}}') == (3, '{"args": [[4]], "kwargs": {}}')

"""Operators that a step calls as methods of tensors or as functions: what is dispatched is the recorded call with its
arguments, or one that gives the same bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.flows.benchmarks.remat.modules import Mamba
from stowage.stages.ir.arguments import split_receiver
from stowage.stages.ir.operators import ALIKE, FUNCTIONS, METHODS
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.profile.arguments import as_called, kernel_of, make_arguments, operator_of
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
            if call.target in (*METHODS, *FUNCTIONS, *ALIKE):
                found[call.target].setdefault(call.signature, (call, trace))
    return found


def alike(a: Any, b: Any) -> bool:
    """The same tensors and equal plain values of the same kinds."""
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


def cases(target: str) -> Iterator[tuple[Call, list[Any], dict[str, Any]]]:
    """Calls of an operator with arguments."""
    calls = list(recorded()[target].values())
    assert calls, "none of the models calls it: leave it out, or add one that does"
    for call, trace in calls[:: max(1, len(calls) // FEW)]:
        yield call, *make_arguments(call, trace, torch.device("cpu"))


def without_defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords of factories that say what holds anyway; bindings of PyTorch fill them in."""
    usual = {"layout": (None, torch.strided), "pin_memory": (None, False)}
    return {name: value for name, value in kwargs.items() if value not in usual.get(name, ())}


@pytest.mark.parametrize("target", sorted({*METHODS, *FUNCTIONS}))
def test_the_recorded_call_is_dispatched(target: str) -> None:
    for call, args, kwargs in cases(target):
        with torch.no_grad(), Dispatched() as dispatched:
            kernel_of(call)(*as_called(call, args), **kwargs)
        ((operator, seen, named),) = dispatched.calls
        assert operator is operator_of(target)
        assert alike(args, list(seen))
        expected, named = without_defaults(kwargs), without_defaults(named)
        assert expected.keys() == named.keys()
        assert all(alike(value, named[name]) for name, value in expected.items())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def clones(args: list[Any]) -> list[Any]:
    return [a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("target", sorted(ALIKE))
def test_alike_gives_the_same_bits_in_the_same_form(target: str) -> None:
    """Also of other types, and of numbers that are rounded."""
    name = target.split(".")[1]
    found = [(call, args) for call, args, _ in cases(target)]
    made = [(None, [a.clone(), n]) for a in SAMPLES for n in (0.1, -3, 1e-9, 7.25)] if "Scalar" in target else []
    for call, args in [*found, *made]:
        one, two = clones(args), clones(args)
        try:
            expected = operator_of(target)(*one)
        except RuntimeError:  # an integer cannot take the result in place
            continue
        given = getattr(torch.Tensor, ALIKE[target])(*(as_called(call, two) if call is not None else two))
        assert (given.dtype, given.shape, given.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert bits(given) == bits(expected)
        shares = expected.untyped_storage().data_ptr() == one[0].untyped_storage().data_ptr()
        assert shares == (given.untyped_storage().data_ptr() == two[0].untyped_storage().data_ptr()), name


SAMPLES = [
    torch.linspace(-3, 5, 24, dtype=torch.float32).view(4, 6).t(),
    torch.linspace(-3, 5, 24, dtype=torch.bfloat16),
    torch.linspace(-3, 5, 24, dtype=torch.float16),
    torch.linspace(-3, 5, 24, dtype=torch.float64),
    torch.arange(-4, 9),
    torch.tensor(2.5),
    torch.empty(0, 3),
]


def test_a_scalar_would_be_another_call() -> None:
    """`x.mul(2.0)` dispatches `aten.mul.Tensor`, where 2.0 is recorded as a scalar."""
    assert not set(METHODS).intersection(ALIKE)
    with Dispatched() as dispatched:
        torch.ones(2).mul(2.0)
    assert [str(operator) for operator, _, _ in dispatched.calls] == ["aten.ones.default", "aten.mul.Tensor"]


def test_a_first_argument_that_is_no_tensor_has_no_methods() -> None:
    assert split_receiver('{"args": [2.0, {"value": 3}], "kwargs": {}}') is None
    assert split_receiver('{"args": [], "kwargs": {}}') is None
    assert split_receiver('{"args": [{"value": 3}, [4]], "kwargs": {}}') == (3, '{"args": [[4]], "kwargs": {}}')

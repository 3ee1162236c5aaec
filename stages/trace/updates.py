"""The optimizer as calls: one `stowage.update` for each parameter that has a gradient, and its states as storages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stowage.stages.ir.trace import Call, Gradient, Storage, Value
from stowage.stages.trace.checks import check_optimizer

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
UPDATE = "stowage.update"
NOT_STRUCTURE = {"lr", "initial_lr", "params"}
"""Settings that change neither the states nor the cost of an update."""


def optimizer_label(optimizer: torch.optim.Optimizer) -> str:
    """Class and settings, without learning rates: what decides states and cost."""
    groups = [{k: repr(v) for k, v in g.items() if k not in NOT_STRUCTURE} for g in optimizer.param_groups]
    distinct = sorted({json.dumps(g, sort_keys=True) for g in groups})
    return f"{type(optimizer).__name__}{distinct}"


def state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a parameter's state, by name."""
    return {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, torch.Tensor)}


def states_after_a_step(factory: OptimizerFactory, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """State tensors of one parameter after its first update: fake, unless the optimizer reads values as it goes."""

    def one_step() -> dict[str, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = factory([parameter])
        check_optimizer(optimizer)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return state_tensors(optimizer, parameter)

    try:
        with FakeTensorMode():
            return one_step()
    except DataDependentOutputException:
        return one_step()


def append_updates(
    storages: list[Storage],
    values: list[Value],
    calls: list[Call],
    gradients: list[Gradient],
    factory: OptimizerFactory,
) -> str:
    """Append one update call per gradient and the storages of its states; return the optimizer's label.

    Raises:
        TraceError: the optimizer does not work per tensor.
    """
    probe = factory([nn.Parameter(torch.zeros(1))])
    check_optimizer(probe)
    label = optimizer_label(probe)
    known: dict[tuple[tuple[int, ...], str], dict[str, torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.gradient_value < 0:
            continue
        parameter = values[gradient.parameter_value]
        key = (parameter.shape, parameter.dtype)
        if key not in known:
            known[key] = states_after_a_step(factory, parameter.shape, getattr(torch, parameter.dtype))
        states: list[int] = []
        for name, tensor in known[key].items():
            storage = Storage(
                len(storages), int(tensor.untyped_storage().nbytes()), "state", f"{gradient.parameter}::{name}"
            )
            storages.append(storage)
            states.append(storage.storage)
        arguments = {
            "args": [gradient.parameter, {"value": gradient.gradient_value}],
            "kwargs": {},
        }
        calls.append(
            Call(
                call=len(calls),
                target=UPDATE,
                arguments=json.dumps(arguments, separators=(",", ":")),
                reads=(gradient.gradient_value, gradient.parameter_value),
                returns=(),
                returns_many=False,
                mutates=tuple(sorted([parameter.storage, *states])),
                is_view=False,
                is_random=False,
                replay_arguments="",
                phase="update",
                module=gradient.parameter.rpartition(".")[0],
                location="",
                signature=f"{UPDATE}|{label}|{parameter.dtype}|{'x'.join(map(str, parameter.shape))}",
            )
        )
    return label

"""The optimizer as calls: one `stowage.update` for each parameter that has a gradient, and its states as storages."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stowage.stages.ir.trace import Call, Gradient, Storage, Value
from stowage.stages.ir.updates import UPDATE, UpdateRule, update_arguments
from stowage.stages.trace.checks import check_optimizer

NOT_STRUCTURE = {"lr", "initial_lr", "params", "param_names"}
"""Settings that change neither the states nor the cost of an update."""


def update_rules(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, UpdateRule]:
    """Parameter name -> how it is updated: the optimizer's class and the settings of the parameter's group."""
    check_optimizer(optimizer)
    kind = type(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    rules: dict[str, UpdateRule] = {}
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k not in NOT_STRUCTURE}
        rule = UpdateRule(f"{kind.__module__}:{kind.__qualname__}", json.dumps(settings, sort_keys=True, default=repr))
        rules.update({names[id(p)]: rule for p in group["params"] if id(p) in names})
    return rules


def states_after_a_step(
    optimizer: torch.optim.Optimizer, rule: UpdateRule, value: Value, device: torch.device
) -> dict[str, torch.Tensor]:
    """State tensors of one parameter after its first update: fake, unless the optimizer reads values as it goes."""
    settings = json.loads(rule.settings)

    def one_step() -> dict[str, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device))
        kind: Any = type(optimizer)
        single: torch.optim.Optimizer = kind([{"params": [parameter], **settings}])
        parameter.grad = torch.zeros_like(parameter)
        single.step()
        return {k: v for k, v in single.state[parameter].items() if isinstance(v, torch.Tensor)}

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
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
) -> str:
    """Append one update call per gradient and the storages of its states; return a label for people.

    A parameter with a gradient that the optimizer does not hold keeps its gradient, as with `optimizer=None`.

    Raises:
        TraceError: the optimizer does not work per tensor.
    """
    rules = update_rules(optimizer, model)
    device = next(iter(model.parameters())).device
    known: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for gradient in gradients:
        rule = rules.get(gradient.parameter)
        if gradient.gradient_value < 0 or rule is None:
            continue
        parameter = values[gradient.parameter_value]
        key = (parameter.shape, parameter.dtype, rule)
        if key not in known:
            known[key] = states_after_a_step(optimizer, rule, parameter, device)
        states: list[int] = []
        for name, tensor in known[key].items():
            nbytes = int(tensor.untyped_storage().nbytes())
            storages.append(Storage(len(storages), nbytes, "state", f"{gradient.parameter}::{name}"))
            states.append(storages[-1].storage)
        shape = "x".join(map(str, parameter.shape))
        calls.append(
            Call(
                call=len(calls),
                target=UPDATE,
                arguments=update_arguments(gradient.parameter, gradient.gradient_value, rule),
                reads=(gradient.gradient_value, gradient.parameter_value),
                returns=(),
                returns_many=False,
                mutates=tuple(sorted([parameter.storage, *states])),
                is_view=False,
                is_random=False,
                replay_arguments="",
                phase="update",
                module=gradient.parameter,
                location="",
                signature=f"{UPDATE}|{rule.optimizer}|{rule.settings}|{parameter.dtype}[{shape}]",
            )
        )
    kinds = sorted({f"{rule.optimizer.rpartition(':')[2]} {rule.settings}" for rule in rules.values()})
    return "; ".join(kinds)

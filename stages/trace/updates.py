"""What happens to gradients as calls: additions to those that wait, clipping, and one `stowage.update` for each
parameter that has a gradient; its optimizer states as storages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stowage.stages.ir.trace import Call, Gradient, Storage, Value
from stowage.stages.ir.updates import ADD, CLIP, NORM, SCALE, UPDATE, UpdateRule, clip_arguments, update_arguments
from stowage.stages.trace.checks import check_gradient_hooks, check_optimizer
from stowage.stages.trace.lower import call_signature

NOT_STRUCTURE = {"lr", "initial_lr", "params", "param_names"}
"""Settings that change neither the states nor the cost of an update."""


@dataclass(frozen=True)
class MicroBatch:
    """What one iteration does with gradients, besides making them.

    Attributes:
        waiting: names of parameters whose `.grad` holds the sum over earlier micro-batches. Their gradients are added
            to it, as `loss.backward()` does.
        update: the last micro-batch: gradients go into updates. Otherwise they stay in `.grad`.
        max_grad_norm: before updates, clip by this global norm as `torch.nn.utils.clip_grad_norm_` does: no update then
            starts before the last gradient is complete. `inf` only computes the norm, and updates do not wait for it:
            gradients that are not finite then spoil their own parameters alone. None does neither.
    """

    waiting: frozenset[str] = field(default_factory=frozenset)
    update: bool = True
    max_grad_norm: float | None = None


def update_rules(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, UpdateRule]:
    """Parameter name -> how it is updated: the optimizer's class and the settings of the parameter's group."""
    check_optimizer(optimizer)
    kind = type(optimizer)
    names = {id(p): name for name, p in parameters.items()}
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


class _Ending:
    """Appends to the tables what follows forward and backward."""

    def __init__(self, storages: list[Storage], values: list[Value], calls: list[Call]) -> None:
        self.storages = storages
        self.values = values
        self.calls = calls
        self._names = {v.name for v in values}

    def storage(self, nbytes: int, role: Any, name: str) -> int:
        self.storages.append(Storage(len(self.storages), nbytes, role, name))
        return self.storages[-1].storage

    def value(self, like: Value, storage: int, name: str, **changed: Any) -> int:
        base, n = name, 1
        while name in self._names:
            n += 1
            name = f"{base}_{n}"
        self._names.add(name)
        content = {**vars(like), "call": -1, "output": 0, "offset": 0, "source": "", **changed}
        content |= {"value": len(self.values), "storage": storage, "name": name}
        self.values.append(Value(**content))
        return self.values[-1].value

    def call(
        self,
        target: str,
        arguments: str,
        reads: tuple[int, ...],
        parameter: str,
        *,
        returns: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        signature: str = "",
    ) -> None:
        self.calls.append(
            Call(
                call=len(self.calls),
                target=target,
                arguments=arguments,
                reads=reads,
                returns=returns,
                returns_many=target == NORM,
                mutates=mutates,
                is_view=False,
                is_random=False,
                replay_arguments="",
                phase="update",
                module=parameter,
                location="",
                signature=signature or call_signature(target, arguments, self.values),
            )
        )

    def waiting(self, parameter: str, like: Value) -> int:
        """A gradient that is in memory from the start."""
        storage = self.storage(_nbytes(like), "gradient", parameter)
        identifier = "grad_" + "".join(c if c.isalnum() else "_" for c in parameter)
        return self.value(like, storage, identifier, source=f"gradient:{parameter}")

    def add(self, parameter: str, waiting: int, gradient: int) -> None:
        """Sum up in place. The sum over one parameter's uses is complete by now, as in eager's accumulation."""
        arguments = _arguments([waiting, gradient])
        home = self.values[waiting].storage
        # What an in-place operator returns is its first argument under a new name, which nothing needs.
        self.call(ADD, arguments, (waiting, gradient), parameter, mutates=(home,))

    def norm(self, parameter: str, gradient: int) -> int:
        """The norm of one gradient, by the kernel that `clip_grad_norm_` uses."""
        like = self.values[gradient]
        storage = self.storage(_itemsize(like), "temporary", f"norm {parameter}")
        value = self.value(like, storage, f"norm_{like.name}", shape=(), stride=(), call=len(self.calls))
        arguments = json.dumps({"args": [[{"value": gradient}], 2.0], "kwargs": {}}, separators=(",", ":"))
        self.call(NORM, arguments, (gradient,), parameter, returns=(value,))
        return value

    def clip(self, norms: list[int], max_norm: float) -> int:
        """The factor for all gradients."""
        like = self.values[norms[0]]
        dtype = like.dtype if len({self.values[n].dtype for n in norms}) == 1 else "float32"
        storage = self.storage(_itemsize(like), "temporary", "clip scale")
        value = self.value(like, storage, "scale", dtype=dtype, call=len(self.calls))
        signature = f"{CLIP}|{len(norms)}|{dtype}"
        self.call(CLIP, clip_arguments(norms, max_norm), tuple(norms), "", returns=(value,), signature=signature)
        return value

    def scale(self, parameter: str, waiting: int, scale: int) -> None:
        """Clip a waiting gradient that no update takes."""
        home = self.values[waiting].storage
        self.call(SCALE, _arguments([waiting, scale]), (waiting, scale), parameter, mutates=(home,))

    def update(
        self, name: str, gradient: int, parameter: Value, states: list[int], rule: UpdateRule, scale: int
    ) -> None:
        """One parameter's update."""
        shape = "x".join(map(str, parameter.shape))
        clipped = scale >= 0
        self.call(
            UPDATE,
            update_arguments(name, gradient, rule, scale),
            (gradient, parameter.value, *([scale] if clipped else [])),
            name,
            mutates=tuple(sorted([parameter.storage, *states])),
            signature=f"{UPDATE}|{rule.optimizer}|{rule.settings}|{parameter.dtype}[{shape}]{'|clipped' * clipped}",
        )


def _arguments(reads: list[int]) -> str:
    return json.dumps({"args": [{"value": v} for v in reads], "kwargs": {}}, separators=(",", ":"))


def _itemsize(value: Value) -> int:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype.itemsize


def _nbytes(value: Value) -> int:
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride)) if all(value.shape) else 0
    return span * _itemsize(value)


def append_updates(
    storages: list[Storage],
    values: list[Value],
    calls: list[Call],
    gradients: list[Gradient],
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, torch.Tensor],
    micro_batch: MicroBatch,
) -> str:
    """Append what happens to gradients, and the storages of optimizer states; return a label for people.

    A parameter with a gradient that the optimizer does not hold keeps its gradient, as with `optimizer=None`.

    Raises:
        TraceError: the optimizer does not work per tensor.
    """
    alone = not micro_batch.waiting and micro_batch.max_grad_norm is None and (micro_batch.update or optimizer is None)
    check_gradient_hooks(parameters, alone=alone)
    rules = update_rules(optimizer, parameters) if optimizer is not None else {}
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    ending = _Ending(storages, values, calls)
    by_source = {v.source.removeprefix("parameter:"): v for v in values if v.source.startswith("parameter:")}
    fresh = {g.parameter: g.gradient_value for g in gradients if g.gradient_value >= 0}
    updating = micro_batch.update and optimizer is not None

    # In the order of the model's parameters: the norm of all norms is a sum, whose rounding depends on it.
    names = [name for name in by_source if name in fresh or name in micro_batch.waiting]
    known: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    states: dict[str, list[int]] = {}
    for name in names:
        rule, parameter = rules.get(name), by_source[name]
        if optimizer is None or rule is None:
            continue
        key = (parameter.shape, parameter.dtype, rule)
        if key not in known:
            known[key] = states_after_a_step(optimizer, rule, parameter, device)
        states[name] = [
            ending.storage(int(tensor.untyped_storage().nbytes()), "state", f"{name}::{state}")
            for state, tensor in known[key].items()
        ]

    waiting = {name: ending.waiting(name, by_source[name]) for name in names if name in micro_batch.waiting}
    for name, gradient in fresh.items():
        if name in waiting:
            ending.add(name, waiting[name], gradient)
    final = {name: waiting.get(name, fresh.get(name, -1)) for name in names}
    scale = -1
    if updating and micro_batch.max_grad_norm is not None and final:
        norms = [ending.norm(name, gradient) for name, gradient in final.items()]
        factor = ending.clip(norms, micro_batch.max_grad_norm)
        scale = factor if math.isfinite(micro_batch.max_grad_norm) else -1
    for name, gradient in final.items() if updating else ():
        rule = rules.get(name)
        if rule is not None:
            ending.update(name, gradient, by_source[name], states[name], rule, scale)
        elif scale >= 0 and name in waiting:
            ending.scale(name, gradient, scale)
    kinds = sorted({f"{rule.optimizer.rpartition(':')[2]} {rule.settings}" for rule in rules.values()})
    return "; ".join(kinds)

"""Makes real or fake arguments for one call from the trace alone."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode

from stowage.stages.ir.arguments import map_arguments, split_receiver, spread_out
from stowage.stages.ir.operators import ALIKE, FUNCTIONS, METHODS, OPAQUE, SEALS, SPREAD, without_overload
from stowage.stages.ir.results import flat_results
from stowage.stages.ir.trace import Call, TraceTables, Value
from stowage.stages.kernels import SUBSTITUTES, USUAL, Around, ContentKind, Form, made_up


def operator_of(target: str) -> Any:
    """Return the operator of a name such as `aten.addmm.default`."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def kernel_of(call: Call) -> Any:
    """Return what a step calls: the operator, or the method of tensors or the function that reaches it faster."""
    method = METHODS.get(call.target) or ALIKE.get(call.target)
    if method is not None and split_receiver(call.arguments) is not None:
        return getattr(torch.Tensor, method)
    if call.target in FUNCTIONS:
        return getattr(torch, FUNCTIONS[call.target])
    return operator_of(call.target)


def as_called(call: Call, args: list[Any]) -> list[Any]:
    """Return the arguments in the form in which a step gives them."""
    if call.target in SPREAD and split_receiver(call.arguments) is not None:
        return [args[0], *spread_out(args[1:])]
    return args


def form_of(value: Value) -> Form:
    """Return type, shape and strides of a value."""
    return Form(getattr(torch, value.dtype), value.shape, value.stride, value.offset)


def around_of(call: Call, trace: TraceTables) -> Around:
    """Describe the arguments of a call, for contents that fit each other."""
    args, kwargs = map_arguments(call.arguments, lambda key, content: None)
    return Around.of((form_of(trace.values[read]) for read in call.reads), [*args, *kwargs.values()])


def make_arguments(
    call: Call, trace: TraceTables, device: torch.device, kind: ContentKind = USUAL
) -> tuple[list[Any], dict[str, Any]]:
    """Make arguments for `call`; one tensor for each distinct value."""
    tensors: dict[int, torch.Tensor] = {}
    around = around_of(call, trace)
    for read in call.reads:
        maker = trace.calls[trace.values[read].call] if trace.values[read].call >= 0 else None
        if maker is not None and is_sealed(maker, call) and read not in tensors:
            tensors.update(sealed_outputs(maker, trace, device, kind))

    def leaf(key: str, content: Any) -> Any:
        if key != "value":
            return constant_of(key, content, device)
        if content not in tensors:
            value = trace.values[content]
            tensors[content] = made_up(form_of(value), place_of(value, device), kind, around)
        return tensors[content]

    return map_arguments(call.arguments, leaf)


def is_sealed(maker: Call, reader: Call) -> bool:
    """Return whether what `reader` reads of `maker` cannot be made up; see `SEALS`."""
    return SEALS.get(without_overload(maker.target)) == without_overload(reader.target)


def sealed_outputs(
    maker: Call, trace: TraceTables, device: torch.device, kind: ContentKind = USUAL
) -> dict[int, torch.Tensor]:
    """Run the call and return its results for its reader, by value; under a fake mode, fake tensors for them."""
    args, kwargs = make_arguments(maker, trace, device, kind)
    operator = operator_of(maker.target)
    if detect_fake_mode() is not None:
        operator = SUBSTITUTES.get(operator, operator)
    with torch.set_grad_enabled(maker.target in OPAQUE):
        made = operator(*args, **kwargs)
    return {v: t for v, t in zip(maker.returns, flat_results(made), strict=True) if v >= 0}


def place_of(value: Value, device: torch.device) -> torch.device:
    """Return the place of a value in a step on `device`."""
    return torch.device("cpu") if value.on_host else device


def tensors_in(args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors among arguments, in order."""
    found: list[torch.Tensor] = []
    for argument in [*args, *kwargs.values()]:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list):
            found += tensors_in(argument, {})
    return found


def constant_of(key: str, content: Any, device: torch.device) -> Any:
    """Return an argument that is no tensor from its entry in the tables; see `ir.arguments`."""
    match key:
        case "float":
            return float(content)
        case "complex":
            return complex(*content)
        case "device":
            return torch.device("cpu") if torch.device(content).type == "cpu" else device
        case _:
            return getattr(torch, content)

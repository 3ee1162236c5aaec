"""Real or fake arguments for one call, made from the trace alone."""

from __future__ import annotations

from typing import Any

import torch

from stowage.stages.ir.arguments import map_arguments, split_receiver
from stowage.stages.ir.operators import METHODS, OPAQUE
from stowage.stages.ir.trace import Call, TraceTables, Value


def operator_of(target: str) -> Any:
    """The operator behind `aten.addmm.default`."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def kernel_of(call: Call) -> Any:
    """What a step calls for it: the operator, or the method of tensors that reaches it sooner."""
    if call.target in METHODS and split_receiver(call.arguments) is not None:
        return getattr(torch.Tensor, METHODS[call.target])
    return operator_of(call.target)


def make_tensor(value: Value, device: torch.device, *, integers: int) -> torch.Tensor:
    """A tensor laid out like `value`; floats in [0.5, 1.5), integers below `integers`, booleans true."""
    dtype = getattr(torch, value.dtype)
    span = 1 + value.offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride)) if all(value.shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        base = torch.rand(span, device=device).add_(0.5).to(dtype)
    elif dtype == torch.bool:
        base = torch.ones(span, dtype=dtype, device=device)
    else:
        base = torch.randint(0, max(integers, 1), (span,), device=device).to(dtype)
    return base.as_strided(value.shape, value.stride, value.offset if span else 0)


def make_arguments(
    call: Call, trace: TraceTables, device: torch.device, *, integers: int = 2
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for `call`; one tensor for each distinct value."""
    tensors: dict[int, torch.Tensor] = {}
    for read in call.reads:
        maker = trace.calls[trace.values[read].call] if trace.values[read].call >= 0 else None
        if maker is not None and maker.target in OPAQUE and read not in tensors:
            args, kwargs = make_arguments(maker, trace, device, integers=integers)
            with torch.enable_grad():
                tensors.update(zip(maker.returns, operator_of(maker.target)(*args, **kwargs)))

    def leaf(key: str, content: Any) -> Any:
        if key != "value":
            return constant_of(key, content, device)
        if content not in tensors:
            tensors[content] = make_tensor(trace.values[content], device, integers=integers)
        return tensors[content]

    return map_arguments(call.arguments, leaf)


def constant_of(key: str, content: Any, device: torch.device) -> Any:
    """What an object among the arguments stands for that is no tensor; see `ir.arguments`."""
    match key:
        case "float":
            return float(content)
        case "complex":
            return complex(*content)
        case "device":
            return device
        case _:
            return getattr(torch, content)

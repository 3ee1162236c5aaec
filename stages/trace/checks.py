"""Refuses what cannot be traced, before or after tracing, in one sentence that names the module and the line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from stowage.stages.ir.errors import DrawsElsewhere, TraceError
from stowage.stages.trace.lines import source_line
from stowage.stages.trace.objects.preserve import Snapshot

_WRAPPERS = {
    "OptimizedModule": "is compiled with torch.compile: pass the module before compiling it",
    "DistributedDataParallel": "is wrapped in DistributedDataParallel: pass the inner module (`.module`)",
    "DataParallel": "is wrapped in DataParallel: pass the inner module (`.module`)",
    "FullyShardedDataParallel": "is wrapped in FullyShardedDataParallel: pass the module before sharding it",
    "FSDPModule": "is sharded with fully_shard: pass the module before sharding it",
    "ScriptModule": "is a program of torch.jit.script: pass the module before scripting it",
    "TracedModule": "is a program of torch.jit.trace: pass the module before tracing it",
    "TopLevelTracedModule": "is a program of torch.jit.trace: pass the module before tracing it",
}


def check_module(model: nn.Module) -> None:
    """Raise `TraceError` for a wrapper that hides the model's operations."""
    for path, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
                raise TraceError(f"{_place(path, module)} {_WRAPPERS[base.__name__]}.")


def check_parameters(model: nn.Module) -> None:
    """Raise `TraceError` for parameters that a step cannot be planned with.

    These have no shape yet, are on several devices, or have gradients without a fixed size.
    """
    places: dict[torch.device, str] = {}
    for path, module in model.named_modules():
        if any(isinstance(p, (UninitializedParameter, UninitializedBuffer)) for p in module._parameters.values()):
            raise TraceError(
                f"{_place(path, module)} has parameters that get their shape from the first batch: run one batch "
                "through the model before fit."
            )
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                places.setdefault(parameter.device, f"{path}.{name}" if path else name)
        if len(places) > 1:
            listed = ", ".join(f"'{name}' on {device}" for device, name in places.items())
            raise TraceError(
                f"The model is on several devices ({listed}), and a step is planned for one: move the model to it."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise TraceError(
                f"{_place(path, module)} has sparse=True, and the size of its gradient depends on data: make it with "
                "sparse=False."
            )


def _place(path: str, module: nn.Module) -> str:
    """Name a module and its line; only for errors, because looking up lines takes longer than tracing."""
    return f"Module '{path or type(module).__name__}' ({source_line(module)})"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `TraceError` for an optimizer whose step computes gradients again."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = parameter is not None and parameter.default is inspect.Parameter.empty
    if needs_closure or isinstance(optimizer, torch.optim.LBFGS):
        raise TraceError(
            f"The optimizer {type(optimizer).__name__} needs a closure, which runs the model as often as it likes: use "
            "an optimizer whose step takes the gradients that are there, such as AdamW or SGD."
        )


def check_gradient_hooks(parameters: Mapping[str, torch.Tensor], *, alone: bool) -> None:
    """Raise `TraceError` for hooks on complete gradients where the plan does more with these than update or keep.

    Args:
        parameters: name -> parameter.
        alone: each gradient is only used by its own update, or kept.
    """
    for name, parameter in parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) and not alone:
            raise TraceError(
                f"Parameter '{name}' has a hook of register_post_accumulate_grad_hook, which would run after gradients "
                "have been added up or clipped: use register_hook, or train without accumulation and clipping."
            )


def check_generators(snapshot: Snapshot) -> None:
    """Raise `DrawsElsewhere` for a step that draws from generators that a planned step would not draw from."""
    changed = snapshot.generators_moved()
    if changed:
        other = "torch.rand(()) or torch.randint" if changed.startswith("Python") else "torch.rand or torch.randn"
        raise DrawsElsewhere(
            f"The step draws numbers from {changed}, which a planned step would not do again: draw them with {other}, "
            "or before the step, and pass them in the batch."
        )


def check_gradients(snapshot: Snapshot) -> None:
    """Raise `TraceError` for a step that calls backward itself."""
    if any(isinstance(c.holder, torch.Tensor) and c.key == "grad" for c in snapshot.changes()):
        raise TraceError(
            "The step calls backward itself and leaves gradients behind, which a planned step would do again: return "
            "the loss, and let the step differentiate it."
        )

"""What cannot be traced, found before or after tracing, each in one sentence that names the module and the line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import TraceError

_WRAPPERS = {
    "OptimizedModule": "is compiled with torch.compile: pass the module before compiling it",
    "DistributedDataParallel": "is wrapped in DistributedDataParallel: pass the inner module (`.module`)",
    "DataParallel": "is wrapped in DataParallel: pass the inner module (`.module`)",
    "FullyShardedDataParallel": "is wrapped in FullyShardedDataParallel: pass the module before sharding it",
    "FSDPModule": "is sharded with fully_shard: pass the module before sharding it",
}


def source_line(module: nn.Module) -> str:
    """`file:line` of the module's class, or its class name where the source is not at hand."""
    try:
        file, line = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))[1]
        return f"{file}:{line}"
    except (OSError, TypeError):
        return type(module).__qualname__


def check_module(model: nn.Module) -> None:
    """Raise `TraceError` for a wrapper that hides the model's operations."""
    for path, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
                raise TraceError(
                    f"Module '{path or type(module).__name__}' ({source_line(module)}) {_WRAPPERS[base.__name__]}."
                )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `TraceError` for an optimizer that does not update each tensor on its own."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = parameter is not None and parameter.default is inspect.Parameter.empty
    if needs_closure or isinstance(optimizer, torch.optim.LBFGS):
        raise TraceError(
            f"The optimizer {type(optimizer).__name__} needs a closure, so it cannot update one tensor at a time: "
            "use an optimizer that works per tensor, such as AdamW or SGD."
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise TraceError(
            f"The optimizer {type(optimizer).__name__} has step hooks, which would run once for each parameter instead "
            "of once for each step: remove them, and do their work after the training step."
        )


@contextmanager
def without_gradient_checkpointing(model: nn.Module, notices: list[str]) -> Iterator[None]:
    """Switch off the model's own gradient checkpointing and restore it afterwards; the plan replaces it."""
    switched = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing") is True]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    if switched:
        notices.append(
            f"The model's own gradient checkpointing ({len(switched)} modules) is switched off: the plan replaces it."
        )
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


class SelfChange:
    """Finds modules that change themselves in forward, which a traced program would not repeat."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {path: self._attributes(module) for path, module in model.named_modules()}

    @staticmethod
    def _attributes(module: nn.Module) -> dict[str, Any]:
        plain = (bool, int, float, torch.Tensor)
        return {k: v for k, v in vars(module).items() if isinstance(v, plain) and not k.startswith("__")}

    def check(self) -> None:
        """Raise `TraceError` when an attribute is not what it was; put the old value back first."""
        for path, module in self._model.named_modules():
            before, after = self._before.get(path, {}), self._attributes(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name), after.get(name)
                same = old is new if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) else old == new
                if same:
                    continue
                if name in before:
                    setattr(module, name, old)
                else:
                    delattr(module, name)
                raise TraceError(
                    f"Module '{path}' ({source_line(module)}) changes its attribute '{name}' in forward, which a "
                    "planned step would not repeat: register it as a buffer and change it in place, or compute it "
                    "outside forward."
                )
